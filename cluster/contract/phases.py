"""Which fields of a sealed config vLLM 0.32.0 itself may still write, when, and why."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """Where an engine is between its contract and its end. Only forwards."""

    PLANNING = "planning the KV cache"
    """From the contract (at the end of `get_kv_cache_spec`) until `initialize_from_config` is entered."""
    ALLOCATING = "allocating the KV cache"
    """Inside `initialize_from_config`."""
    SERVING = "serving"
    SHUTDOWN = "shutting down"


@dataclass(frozen=True, slots=True)
class Permit:
    """A write that is vLLM's own business. Without `free`, it may only set the value that the contract fixes."""

    reason: str
    free: bool = False


SEALED: dict[str, frozenset[str] | None] = {
    "cache_config": None,
    "attention_config": None,
    "model_config": frozenset({"model", "dtype", "quantization", "max_model_len", "hf_config"}),
    "scheduler_config": frozenset(
        {"enable_chunked_prefill", "async_scheduling", "max_num_seqs", "max_num_batched_tokens"}
    ),
    "parallel_config": frozenset({"tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"}),
    "speculative_config": frozenset(
        {"method", "num_speculative_tokens", "attention_backend", "kv_cache_dtype", "quantization"}
    ),
    "vllm_config": frozenset(
        {
            "cache_config",
            "attention_config",
            "model_config",
            "scheduler_config",
            "parallel_config",
            "speculative_config",
            "quant_config",
        }
    ),
}
"""Config -> the fields that the contract covers; None for all of them."""

_COUNTS = {
    "cache_config.kv_cache_size_tokens": Permit("derived from the number of blocks, for logs and metrics", free=True),
    "cache_config.kv_cache_max_concurrency": Permit("derived from the number of blocks, for logs", free=True),
}

_HASHING = {
    "cache_config.hash_block_size": Permit("follows from the block sizes; prefix hashes only", free=True),
    "cache_config.cache_hit_alignment_tokens": Permit("follows from the block sizes; prefix hits only", free=True),
}

PERMITTED: dict[Phase, dict[str, Permit]] = {
    Phase.PLANNING: {
        "cache_config.kv_cache_layout": Permit(
            "resolved once by the engine core, and adopted by each worker (v1/attention/backends/utils.py)"
        ),
        "cache_config.enable_prefix_caching": Permit("switched off for non-causal layers (v1/engine/core.py)"),
        "scheduler_config.enable_chunked_prefill": Permit("switched off for non-causal layers (v1/engine/core.py)"),
        "cache_config.block_size": Permit("the smallest of the groups' block sizes (v1/engine/core.py)"),
        "cache_config.num_gpu_blocks": Permit(
            "a small number and then None while graphs are profiled, and then the real one (v1/engine/core.py)",
            free=True,
        ),
        "cache_config.num_gpu_blocks_override": Permit(
            "set and put back while graphs are profiled (v1/worker/gpu/cudagraph_utils.py)", free=True
        ),
        "cache_config.kv_cache_memory_bytes": Permit(
            "taken from a saved startup plan (v1/worker/startup_plan.py)", free=True
        ),
        "model_config.max_model_len": Permit(
            "tried and put back while the length that fits is sought (v1/core/kv_cache_utils.py)", free=True
        ),
        **_COUNTS,
    },
    Phase.ALLOCATING: {
        "cache_config.num_gpu_blocks": Permit("from the KVCacheConfig (v1/worker/gpu_worker.py)"),
        "cache_config.kv_cache_layout": Permit("adopted by a worker that was started late (v1/worker/gpu_worker.py)"),
        **_HASHING,
        **_COUNTS,
    },
    Phase.SERVING: {
        "cache_config.effective_attention_block_size": Permit(
            "read off the scheduler once it exists, for metrics (v1/engine/core.py)", free=True
        ),
    },
    Phase.SHUTDOWN: {
        "cache_config.num_gpu_blocks": Permit("None, as the cache is freed (v1/worker/gpu/shutdown.py)", free=True),
    },
}
