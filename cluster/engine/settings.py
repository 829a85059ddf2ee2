"""What an engine is built from, before vLLM is imported."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from cluster.contract.errors import DocumentError, require_positive
from cluster.engine.cpu import profile
from cluster.engine.draft_path import neutral_draft_path
from cluster.models.draft import Speculation
from cluster.models.folder import ModelFolder

_CPU_BATCHED_TOKENS = 512

EXECUTOR: Final = "cluster.engine.tensor_parallel.TensorParallelExecutor"
"""Of an engine of several tensor-parallel ranks; that of one is vLLM's own."""

LoadFormat = Literal["auto", "dummy"]
"""dummy: random weights, of which the folder needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The sizes of an engine's buffers, by vLLM's names.

    `max_model_len` None means the target's own context; `num_gpu_blocks` None lets vLLM size the KV cache, by
    `gpu_memory_utilization` of its GPU, whose None is vLLM's own share, or by `kv_cache_bytes`. `compilation_mode` 0
    starts without torch.compile, in half the time, and keeps CUDA graphs of decoding; None is vLLM's own choice.
    `stream_interval` are the tokens that a message of a stream has at least, after the first: each message costs.
    `tensor_parallel_size` are the devices of one host over which the target is split; a separate draft has one.
    `dtype`, `kv_cache_dtype` and `attention_backend` are the target's, None for what vLLM chooses; a draft has its
    target's as far as the contract's policy says.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    compilation_mode: Literal[0, 3] | None = None
    stream_interval: int = 1
    tensor_parallel_size: int = 1
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_gpu_blocks=self.num_gpu_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            stream_interval=self.stream_interval,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise DocumentError("gpu_memory_utilization", str(share), "above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(EngineOptions):
    """A target, perhaps with a draft in the same process (placement `colocated`), and the sizes of its buffers.

    With `synthetic_acceptance_length` a round has so many tokens on average, the target's own included, whatever is
    drafted.
    """

    target: ModelFolder
    speculation: Speculation | None = None
    load_format: LoadFormat = "auto"
    synthetic_acceptance_length: float | None = None

    @property
    def context_length(self) -> int | None:
        """The most tokens that prompt and answer have together, or None where the model's config doesn't say."""
        return self.max_model_len or self.target.integer("max_position_embeddings")

    def to_engine_args(self) -> dict[str, Any]:
        """Keyword arguments for `vllm.EngineArgs`."""
        arguments: dict[str, Any] = {
            "model": str(self.target.path),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_gpu_blocks_override": self.num_gpu_blocks,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "enable_prefix_caching": self.enable_prefix_caching,
            "seed": self.seed,
            "load_format": self.load_format,
            "stream_interval": self.stream_interval,
            "use_tqdm_on_load": False,
        }
        for name in ("gpu_memory_utilization", "dtype", "kv_cache_dtype", "attention_backend"):
            if (value := getattr(self, name)) is not None:
                arguments[name] = value
        if self.tensor_parallel_size > 1:
            arguments |= {"tensor_parallel_size": self.tensor_parallel_size, "distributed_executor_backend": EXECUTOR}
        if self.compilation_mode is not None:
            arguments["compilation_config"] = {"mode": self.compilation_mode}
        if profile.is_cpu_installation():
            # float32: kernels for bfloat16 need AVX-512. Eager: compiling takes longer than any run on a CPU. A small
            # budget: the kernels pad their outputs to it each round, which the interpreter does 16 tokens at a time.
            arguments |= {"dtype": self.dtype or "float32", "enforce_eager": True}
            arguments["max_num_batched_tokens"] = self.max_num_batched_tokens or _CPU_BATCHED_TOKENS
        if self.speculation is not None:
            arguments["per_request_spec_decode_metrics"] = "detailed"
            arguments["speculative_config"] = {
                "model": str(neutral_draft_path(self.speculation.draft.path)),
                "method": self.speculation.method,
                "num_speculative_tokens": self.speculation.num_speculative_tokens,
            }
            if self.synthetic_acceptance_length is not None:
                arguments["speculative_config"] |= {
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_length": self.synthetic_acceptance_length,
                }
        return arguments
