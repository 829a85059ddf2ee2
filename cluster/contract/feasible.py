"""Which attention backends can run a layer, in which cache dtypes, and why the others can't: asked of vLLM.

On CUDA every backend of the platform's priority list is asked (`validate_configuration`). A CPU has one backend for
each kind of attention, and nothing to ask.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform

from cluster.contract.facts import BackendFacts, BlockSize, FormatFacts, InfeasibleBackend
from cluster.contract.selections import Selection
from cluster.contract.vllm_names import (
    AttentionBackend,
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MultipleOf,
    SlidingWindowSpec,
    customize_attention_spec,
    get_kv_quant_mode,
    kv_cache_dtype_str_to_dtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltLayer:
    """An attention layer after its constructor: vLLM's object, its spec as grouped, and what it asked the selector."""

    layer: Any
    spec: KVCacheSpec
    selection: Selection | None

    @property
    def backend(self) -> type[AttentionBackend]:
        backend: type[AttentionBackend] = self.layer.get_attn_backend()
        return backend

    @property
    def cache_dtype(self) -> str:
        """The word that this layer's kernels go by; a layer that has none is allocated and read by its spec's."""
        return getattr(self.layer, "kv_cache_dtype", None) or getattr(self.spec, "cache_dtype_str", None) or "auto"


def find_backends(
    built: BuiltLayer, vllm_config: VllmConfig
) -> tuple[tuple[BackendFacts, ...], tuple[InfeasibleBackend, ...]]:
    """The feasible backends, first the one that the layer has; and the others with vLLM's reasons."""
    feasible = [_facts(built, built.backend, vllm_config)]
    infeasible = []
    for name, backend, reasons in _others(built):
        words = [] if backend is None else list(_words(backend, built))
        if backend is None or not words:
            infeasible.append(InfeasibleBackend(name=name, reasons=tuple(reasons)))
        else:
            feasible.append(_facts(built, backend, vllm_config, words))
    return tuple(feasible), tuple(infeasible)


def _others(built: BuiltLayer) -> Iterator[tuple[str, type[AttentionBackend] | None, list[str]]]:
    """(name, class or None where it can't be imported, reasons against it as configured), by vLLM's priority."""
    asked = built.selection
    if asked is None:
        return
    if not current_platform.is_cuda():
        if asked.requested is not None and asked.requested.name != built.backend.get_name():
            yield asked.requested.name, None, [f"this platform takes {built.backend.get_name()} whatever is asked for"]
        return
    valid, invalid = current_platform.get_valid_backends(
        device_capability=current_platform.get_device_capability(),
        attn_selector_config=asked.config,
        num_heads=asked.num_heads,
    )
    ranked: list[tuple[int, Any, list[str]]] = [(found.priority, found.backend, []) for found in valid]
    ranked += [(priority, backend, reasons) for backend, (priority, reasons) in invalid.items()]
    for _, backend, reasons in sorted(ranked, key=lambda entry: entry[0]):
        if backend.name == built.backend.get_name():
            continue
        try:
            yield backend.name, backend.get_class(), reasons
        except (ImportError, OSError):  # as vLLM takes it: its reasons name the library
            yield backend.name, None, reasons


def _words(backend: type[AttentionBackend], built: BuiltLayer) -> Iterator[str]:
    """Cache dtypes that this backend takes for the layer, the configured one first."""
    asked = built.selection
    if asked is None:
        return
    for word in dict.fromkeys((built.cache_dtype, *get_args(CacheDType))):
        if (word == built.cache_dtype or _is_dense(built.spec)) and not _reasons(backend, asked, word):
            yield word


def _reasons(backend: type[AttentionBackend], asked: Selection, word: str) -> list[str]:
    question = asked.config._replace(kv_cache_dtype=word)._asdict()
    reasons: list[str] = backend.validate_configuration(
        device_capability=current_platform.get_device_capability(), **question
    )
    return reasons


def _is_dense(spec: KVCacheSpec) -> bool:
    """Whether a page follows from heads and dtype alone, so that it can be had in another dtype.

    MLA layers derive their packing from the dtype in their constructors: of them only what was built is known.
    """
    return type(spec) in (FullAttentionSpec, SlidingWindowSpec)


def _facts(
    built: BuiltLayer, backend: type[AttentionBackend], vllm_config: VllmConfig, words: list[str] | None = None
) -> BackendFacts:
    """Without `words`: of the backend that the layer has, so in the configured format whatever vLLM says of that."""
    if words is None:
        words = [built.cache_dtype, *(word for word in _words(backend, built) if word != built.cache_dtype)]
    layouts = backend.supported_kv_cache_layouts() or ()
    spec = _respecified(built, backend, words[0], vllm_config)
    return BackendFacts(
        name=backend.get_name(),
        formats=tuple(_format(_respecified(built, backend, word, vllm_config), word) for word in words),
        kernel_block_sizes=_block_sizes(backend, spec),
        splits_blocks=_splits_blocks(spec),
        layouts=tuple(layout.name for layout in layouts),
        index_width=_index_width(vllm_config) if backend.is_sparse() else None,
    )


def _respecified(built: BuiltLayer, backend: type[AttentionBackend], word: str, vllm_config: VllmConfig) -> KVCacheSpec:
    """The layer's spec as this backend and cache dtype would make it."""
    spec = built.spec
    if not _is_dense(spec) or (backend is built.backend and word == built.cache_dtype):
        return spec
    plain = replace(
        spec,
        dtype=kv_cache_dtype_str_to_dtype(word, vllm_config.model_config),
        kv_quant_mode=get_kv_quant_mode(word),
        num_head_slots=None,
        state_content_bytes=None,
        block_stride_alignment=None,
        page_size_padded=None,
    )
    return customize_attention_spec(backend, plain)


def _format(spec: KVCacheSpec, word: str) -> FormatFacts:
    allocated = getattr(spec, "cache_dtype_str", None) or word
    alignment = getattr(spec, "alignment", None)
    return FormatFacts(
        cache_dtype=allocated,
        dtype=str(getattr(spec, "dtype", "uint8")).removeprefix("torch."),
        num_heads=spec.num_heads,
        state_content_bytes=spec.state_content_size_bytes,
        read_cache_dtype=word if word != allocated else None,
        tokens_per_state=int(spec.tokens_per_state),
        # With an alignment the padding follows from it, whatever the block size.
        page_size_padded=None if alignment else getattr(spec, "page_size_padded", None),
        page_alignment=alignment or 1,
        block_stride_alignment=spec.get_block_stride_alignment(),
    )


def _block_sizes(backend: type[AttentionBackend], spec: KVCacheSpec) -> tuple[BlockSize, ...]:
    sizes = backend.get_supported_kernel_block_sizes(spec) or [MultipleOf(1)]
    return tuple(
        BlockSize(size=size.base, multiple=True) if isinstance(size, MultipleOf) else BlockSize(size=size)
        for size in sizes
    )


def _splits_blocks(spec: KVCacheSpec) -> bool:
    padded = getattr(spec, "page_size_padded", None) is not None
    return isinstance(spec, AttentionSpec) and not padded


def _index_width(vllm_config: VllmConfig) -> int | None:
    return getattr(vllm_config.model_config.hf_text_config, "index_topk", None)
