"""The KV-cache groups of an engine whose layers are built, as facts. Writes nothing and allocates nothing."""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from vllm.config import VllmConfig

from cluster.contract.facts import GroupFacts, KVCacheSpecKind, Role
from cluster.contract.feasible import BuiltLayer, find_backends
from cluster.contract.selections import Selection
from cluster.contract.vllm_names import (
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_groups,
    get_kv_cache_spec_kind,
    get_supported_kv_cache_layouts,
    register_all_kvcache_specs,
    resolve_kv_cache_layout,
)
from cluster.errors import UserError


def read_groups(
    vllm_config: VllmConfig,
    role: Role,
    specs: Mapping[str, KVCacheSpec],
    selections: Mapping[object, Selection],
    of_target: Collection[str] = (),
) -> tuple[GroupFacts, ...]:
    """Group `specs` (by layer, as `get_kv_cache_spec` gives them) as the engine core would. `of_target` are those of a
    draft's that stand for the target's.

    Raises:
        UserError: a layer keeps KV of a kind that no contract covers, or the backends have no layout in common.
    """
    layers = vllm_config.compilation_config.static_forward_context
    groups = []
    for name, grouped in _named(_grouped(vllm_config, specs, layers)):
        built = {
            layer: BuiltLayer(layer=layers[layer], spec=spec, selection=selections.get(layers[layer]))
            for layer, spec in grouped.items()
        }
        parts = list(_alike(built))
        for i, names in enumerate(parts):
            part = name if len(parts) == 1 else f"{name}/{i}"
            whose = "target" if names[0] in of_target else role
            groups.append(_facts(vllm_config, whose, part, name, names, built[names[0]]))
    return tuple(groups)


def _grouped(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], layers: Mapping[str, Any]
) -> list[dict[str, KVCacheSpec]]:
    """One dict a block table of vLLM: the layers on it, with their specs as the core unifies them."""
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)  # it keeps the layout, which is the core's to write
    register_all_kvcache_specs(config)
    backends = dict.fromkeys(layers[layer].get_attn_backend() for layer in specs)
    try:
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        groups = get_kv_cache_groups(config, dict(retaining(config, specs)))
    except (ValueError, NotImplementedError) as error:
        why = " ".join(str(error).split())
        raise UserError("vLLM can't group this model's KV cache", why, "name another attention backend") from error
    return [{layer: _spec_of(group.kv_cache_spec, layer) for layer in group.layer_names} for group in groups]


def retaining(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> Iterator[tuple[str, KVCacheSpec]]:
    """As `get_kv_cache_configs` does before it groups: windows keep what several draft modules look back at."""
    extra = max(0, vllm_config.num_prefill_lookahead_tokens - 1)
    for layer, spec in specs.items():
        is_window = isinstance(spec, SlidingWindowSpec)
        yield layer, replace(spec, extra_retained_tokens=extra) if is_window else spec


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _named(groups: list[dict[str, KVCacheSpec]]) -> Iterator[tuple[str, dict[str, KVCacheSpec]]]:
    """By kind; numbered where there are several of one."""
    kinds = [_kind(next(iter(group.items()))) for group in groups]
    seen: Counter[str] = Counter()
    for kind, group in zip(kinds, groups, strict=True):
        yield (f"{kind}.{seen[kind]}" if kinds.count(kind) > 1 else kind), group
        seen[kind] += 1


def _kind(named_spec: tuple[str, KVCacheSpec]) -> KVCacheSpecKind:
    layer, spec = named_spec
    found = get_kv_cache_spec_kind(spec).value
    for kind in get_args(KVCacheSpecKind):
        if kind == found:
            return kind  # type: ignore[no-any-return]
    raise UserError(
        f"layer {layer}",
        f"its KV cache is a {type(spec).__name__}, which contracts don't cover",
        "take a model with attention or Mamba layers only",
    )


def _alike(built: Mapping[str, BuiltLayer]) -> Iterable[list[str]]:
    """Layers with the same spec, backend, query heads and reading."""
    parts: dict[tuple[object, ...], list[str]] = {}
    for name, layer in built.items():
        key = (layer.spec, layer.backend.full_cls_name(), getattr(layer.layer, "num_heads", 0), layer.cache_dtype)
        parts.setdefault(key, []).append(name)
    return parts.values()


def _facts(
    vllm_config: VllmConfig, role: Role, name: str, table: str, layers: list[str], built: BuiltLayer
) -> GroupFacts:
    backends, infeasible = find_backends(built, vllm_config)
    spec = built.spec
    kv_heads = getattr(spec, "num_kv_heads", 1)
    return GroupFacts(
        name=name,
        role=role,
        layers=tuple(layers),
        kind=_kind((layers[0], spec)),
        backends=backends,
        infeasible=infeasible,
        block_size=spec.block_size,
        num_attention_heads=getattr(built.layer, "num_heads", kv_heads),
        num_kv_heads=kv_heads,
        head_size=getattr(spec, "head_size", 0),
        head_size_v=getattr(spec, "head_size_v", 0),
        use_sparse=built.backend.is_sparse(),
        use_non_causal=built.selection is not None and built.selection.config.use_non_causal,
        sliding_window=getattr(spec, "sliding_window", None),
        block_table=table if table != name else None,
        scales=_scales(built),
    )


def _scales(built: BuiltLayer) -> str:
    """In the cache itself for formats that pack them; in the checkpoint where its quantisation has a scheme for KV;
    else a quantised cache takes 1."""
    word = built.cache_dtype
    if word.endswith(("_ds_mla", "_per_token_head")):
        return "in the cache"
    if not word.startswith(("fp8", "int8", "int4", "nvfp4")):
        return "none"
    declared = getattr(getattr(built.layer, "quant_config", None), "kv_cache_scheme", None)
    return "checkpoint" if declared else "unit"
