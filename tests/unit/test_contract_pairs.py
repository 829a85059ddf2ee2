"""Pairs of facts as the other contract tests use them, written by hand after public models and reports.

Figures are of one rank. Where a report gives none, the model's config does.
"""

from dataclasses import replace
from typing import Any

import pytest

from cluster.contract.contract import KVContract
from cluster.contract.facts import (
    BackendFacts,
    BlockSize,
    ConfigWrite,
    FormatFacts,
    GroupFacts,
    InfeasibleBackend,
    QuantizationFacts,
    SideFacts,
)
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy

GIB = 1 << 30
MULTIPLE_OF_16 = (BlockSize(size=16, multiple=True),)


def format(cache_dtype: str = "auto", row_bytes: int = 4096, heads: int = 8, **more: Any) -> FormatFacts:
    """`row_bytes` over all heads; `auto` is bfloat16, anything else bytes."""
    dtype = "bfloat16" if cache_dtype in ("auto", "bfloat16") else "uint8"
    facts = {"dtype": dtype, "num_heads": heads, "state_content_bytes": row_bytes // heads} | more
    return FormatFacts(cache_dtype=cache_dtype, **facts)


def backend(
    name: str, *formats: FormatFacts, sizes: tuple[BlockSize, ...] = MULTIPLE_OF_16, **more: Any
) -> BackendFacts:
    return BackendFacts(name=name, formats=formats or (format(),), kernel_block_sizes=sizes, **more)


def cannot(name: str, *reasons: str) -> InfeasibleBackend:
    return InfeasibleBackend(name=name, reasons=reasons)


def group(name: str, role: str, *backends: BackendFacts, layers: int = 36, **more: Any) -> GroupFacts:
    facts: dict[str, Any] = {
        "layers": tuple(f"{name}.layers.{i}.self_attn.attn" for i in range(layers)),
        "kind": "full_attention",
        "block_size": 16,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "head_size_v": 128,
    }
    return GroupFacts(name=name, role=role, backends=backends, **(facts | more))  # type: ignore[arg-type]


def side(role: str, *groups: GroupFacts, **more: Any) -> SideFacts:
    """Qwen3-8B with a 5-layer DSpark draft, but for what is given."""
    facts: dict[str, Any] = {
        "vllm_version": "0.32.0",
        "vllm_build": "cu130",
        "runner": "v2",
        "platform": "cuda",
        "compute_capability": (9, 0),
        "model": f"example/{role}",
        "config_digest": f"sha256:{role}",
        "tokenizer_digest": "sha256:tokenizer",
        "vocab_size": 151_936,
        "dtype": "bfloat16",
        "quantization": QuantizationFacts(),
        "max_model_len": 40_960,
        "method": "dspark",
        "num_speculative_tokens": 7,
        "num_hidden_layers": 36 if role == "target" else 5,
        "hidden_size": 4096,
        "target_hidden_size": 4096,
        "aux_hidden_state_layers": (2, 10, 18, 26, 34),
        "wire_hidden_size": 4096,
        "wire_dtype": "bfloat16",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": True,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "weight_bytes": 16 * GIB if role == "target" else 4 * GIB,
        "kv_cache_bytes": 100 * GIB,
    }
    return SideFacts(role=role, groups=groups, **(facts | more))  # type: ignore[arg-type]


Pair = tuple[SideFacts, SideFacts]


def qwen3_8b() -> Pair:
    """The common case: one backend and one dtype for both."""
    fp8 = format("fp8", 2048)
    target = group("full", "target", backend("FLASH_ATTN", format(), fp8), backend("TRITON_ATTN", format(), fp8))
    draft = group(
        "draft",
        "draft",
        backend("FLASHINFER", format(), fp8, layouts=("LBHNC", "BLHNC")),
        backend("FLASH_ATTN", format(), fp8),
        layers=5,
        use_non_causal=True,
        infeasible=(cannot("TRITON_ATTN", "non-causal attention not supported"),),
    )
    return side("target", target), side(
        "draft", draft, shared_weight_bytes=2 * GIB, projection_bytes=5 * 4096 * 4096 * 2, kv_cache_bytes=120 * GIB
    )


_DSV4_SIZE = {"sizes": (BlockSize(size=64),)}


def _plain_fp8(**more: Any) -> BackendFacts:
    """FlashInfer's DeepSeek-V4 backend on SM10x: a plain row of 512 FP8 values."""
    row = format("fp8", 512, heads=1, dtype="float8_e4m3fn", page_alignment=512)
    return backend("FLASHINFER_MLA_SPARSE_DSV4", row, **_DSV4_SIZE, **more)


def _fp8_ds_mla(**more: Any) -> BackendFacts:
    """FlashMLA's: 448 B + 128 B of RoPE + 8 B of scales, packed."""
    row = format("fp8_ds_mla", 584, heads=1, page_alignment=576)
    return backend("FLASHMLA_SPARSE_DSV4", row, **_DSV4_SIZE, **more)


DSV4_WRITE = ConfigWrite(
    field="cache_config.cache_dtype",
    old="fp8",
    new="fp8_ds_mla",
    writer="DeepseekV4FlashMLAAttention",
    location="vllm/models/deepseek_v4/attention.py:119",
)


def deepseek_v4() -> Pair:
    """vLLM #52288: a pinned target backend, and a draft whose own first choice rewrites a shared cache_config."""
    facts: dict[str, Any] = {
        "kind": "sliding_window_mla",
        "sliding_window": 128,
        "block_size": 64,
        "num_attention_heads": 64,
        "num_kv_heads": 1,
        "head_size": 512,
        "head_size_v": 0,
        "use_sparse": True,
    }
    swa = group("swa", "target", _plain_fp8(), layers=43, **facts)
    draft = group("swa", "draft", _fp8_ds_mla(), _plain_fp8(), layers=3, use_non_causal=True, **facts)
    common: dict[str, Any] = {"vocab_size": 129_280, "compute_capability": (10, 0), "max_model_len": 65_536}
    return side("target", swa, **common), side("draft", draft, constructor_writes=(DSV4_WRITE,), **common)


def glm_5_2() -> Pair:
    """vLLM #48380: an MLA target in fp8_ds_mla and a dense draft that no backend runs in it."""
    target = group(
        "mla",
        "target",
        backend("FLASHMLA_SPARSE", format("fp8_ds_mla", 656, heads=1), sizes=(BlockSize(size=64),)),
        kind="mla_attention",
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        head_size_v=0,
        use_sparse=True,
        layers=78,
    )
    dense = (format("auto", 1024), format("bfloat16", 1024))
    draft = group(
        "draft",
        "draft",
        backend("FLASH_ATTN", *dense),
        backend("FLASHINFER", *dense, sizes=(BlockSize(size=16), BlockSize(size=32), BlockSize(size=64))),
        backend("TRITON_ATTN", *dense),
        backend("FLEX_ATTENTION", *dense, layouts=("LBNHC",)),
        infeasible=(
            cannot("TURBOQUANT", "non-causal attention not supported", "kv_cache_dtype not supported"),
            cannot("FLASHMLA_SPARSE", "non-MLA not supported", "sparse not supported"),
        ),
        layers=5,
        head_size=64,
        head_size_v=64,
        use_non_causal=True,
    )
    return side("target", target), side("draft", draft)


def gemma_4_dflash() -> Pair:
    """vLLM #42068: the target is locked to TRITON_ATTN, which the draft's non-causal attention can't have."""
    full = group("full", "target", backend("TRITON_ATTN"), layers=10, head_size=512, head_size_v=512)
    window = group(
        "sliding",
        "target",
        backend("TRITON_ATTN"),
        layers=10,
        kind="sliding_window",
        sliding_window=1024,
        head_size=256,
    )
    draft = group(
        "draft",
        "draft",
        backend("FLASH_ATTN", format("auto", 8192)),
        backend("FLEX_ATTENTION", format("auto", 8192), layouts=("LBNHC",)),
        infeasible=(cannot("TRITON_ATTN", "non-causal attention not supported"),),
        layers=5,
        head_size=256,
        head_size_v=256,
        use_non_causal=True,
    )
    facts: dict[str, Any] = {"vocab_size": 262_144, "method": "dflash"}
    return side("target", full, window, **facts), side("draft", draft, **facts)


def gemma_4_mtp() -> Pair:
    """A draft with queries only: its two layers read the target's last full and last sliding layer."""
    target, _ = gemma_4_dflash()
    full, window = target.groups
    reads = [replace(owner, layers=owner.layers[-1:]) for owner in (full, window)]
    facts: dict[str, Any] = {"vocab_size": 262_144, "method": "mtp", "aux_hidden_state_layers": ()}
    return replace(target, method="mtp", aux_hidden_state_layers=()), side("draft", *reads, **facts)


def kimi() -> Pair:
    """vLLM #52809: an MLA target, and a draft with sliding windows that its backend can't run: not to be forced."""
    target = group(
        "mla",
        "target",
        backend("FLASHINFER_MLA", format("auto", 1152, heads=1), sizes=(BlockSize(size=32), BlockSize(size=64))),
        kind="mla_attention",
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        head_size_v=0,
        layers=61,
    )
    draft = group(
        "draft",
        "draft",
        backend("FLASH_ATTN"),
        infeasible=(cannot("FLASHINFER_MLA", "sliding window not supported", "non-MLA not supported"),),
        kind="sliding_window",
        sliding_window=2048,
        layers=5,
    )
    return side("target", target, vocab_size=163_840), side("draft", draft, vocab_size=163_840)


PAIRS = (qwen3_8b, deepseek_v4, glm_5_2, gemma_4_dflash, gemma_4_mtp, kimi)


def contract_of(pair: Pair, **policy: Any) -> KVContract:
    return negotiate(*pair, Policy(**policy))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
def test_each_pair_has_a_contract_by_default(pair: Any) -> None:
    contract = contract_of(pair())
    assert contract.num_blocks > 0
    for group in contract.groups_of("draft"):
        owner = contract.group("target", group.mirrors)
        assert (group.block_size, group.num_blocks) == (owner.block_size, owner.num_blocks)
