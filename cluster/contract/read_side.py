"""The facts of one side, read off a vLLM config whose model is built: in a probe on the meta device, in a worker on its
own. Writes nothing and allocates nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import vllm
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform

from cluster.contract.digests import config_digest, tokenizer_digest
from cluster.contract.facts import ConfigWrite, KVSharing, QuantizationFacts, Role, SideFacts
from cluster.contract.memory import parameter_bytes
from cluster.contract.read_groups import read_groups
from cluster.contract.selections import Selection
from cluster.contract.vllm_names import KVCacheSpec, LinearBase, get_eagle3_aux_layers_from_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What one side knows of the two together. Fields as in `SideFacts`."""

    method: str
    num_speculative_tokens: int
    target_hidden_size: int
    aux_hidden_state_layers: tuple[int, ...] = ()
    wire_hidden_size: int = 0
    """0 where no states cross: a standalone draft takes tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSide:
    """A side whose constructors have run.

    `model` is the name that a person knows it by, and `model_config` that of this side's own model: a draft in its
    target's engine has the target's in `vllm_config`. `weights` are all parameters that the side must hold, `borrowed`
    those of them that a draft would share with its target in one process.
    """

    role: Role
    model: str
    model_config: ModelConfig
    vllm_config: VllmConfig
    pairing: Pairing
    module: torch.nn.Module
    specs: Mapping[str, KVCacheSpec]
    selections: Mapping[object, Selection]
    writes: tuple[ConfigWrite, ...]
    weights: tuple[torch.nn.Parameter, ...]
    borrowed: tuple[torch.nn.Parameter, ...] = ()
    of_target: frozenset[str] = frozenset()
    """Of a draft's `specs`, the layers that stand for the target's, whose KV it reads."""
    kv_exports: tuple[KVSharing, ...] = ("map", "mirror")
    kv_cache_bytes: int | None = None
    """As measured; None to estimate it."""


def pairing_of(speculative: SpeculativeConfig, role: Role) -> Pairing:
    """Of an engine that is configured with both models."""
    target, draft = speculative.target_model_config, speculative.draft_model_config
    hidden_size: int = target.get_hidden_size()
    pairing = Pairing(
        method=speculative.method,
        num_speculative_tokens=speculative.num_speculative_tokens,
        target_hidden_size=hidden_size,
    )
    if speculative.method == "draft_model":
        return pairing
    if role == "draft":  # what it was trained on
        hidden_size = getattr(draft.hf_text_config, "target_hidden_size", None) or draft.get_hidden_size()
    return replace(
        pairing,
        target_hidden_size=hidden_size,
        aux_hidden_state_layers=tuple(get_eagle3_aux_layers_from_config(speculative) or ()),
        wire_hidden_size=draft.get_hidden_size(),
    )


def read_side(side: BuiltSide) -> SideFacts:
    """The facts.

    Raises:
        UserError: the engine isn't one that contracts cover.
    """
    config, model = side.vllm_config, side.model_config
    folder = Path(model.model)
    release, _, build = vllm.__version__.partition("+")
    capability = current_platform.get_device_capability()
    weight_bytes = parameter_bytes(side.weights)
    non_causal = any(getattr(spec, "non_causal", False) for spec in side.specs.values())
    return SideFacts(
        role=side.role,
        vllm_version=release,
        vllm_build=build or (f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"),
        runner="v2" if config.use_v2_model_runner else "v1",
        platform=current_platform.device_type,
        compute_capability=(capability.major, capability.minor) if capability else None,
        model=side.model,
        config_digest=config_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        vocab_size=model.get_vocab_size(),
        draft_vocab_size=_draft_vocab_size(model) if side.role == "draft" else None,
        dtype=_name(model.dtype),
        quantization=_quantization(side),
        max_model_len=model.max_model_len,
        method=side.pairing.method,
        num_speculative_tokens=side.pairing.num_speculative_tokens,
        num_hidden_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        target_hidden_size=side.pairing.target_hidden_size,
        aux_hidden_state_layers=side.pairing.aux_hidden_state_layers,
        wire_hidden_size=side.pairing.wire_hidden_size,
        wire_dtype=_name(config.model_config.dtype),
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        pipeline_parallel_size=config.parallel_config.pipeline_parallel_size,
        decode_context_parallel_size=config.parallel_config.decode_context_parallel_size,
        # As the engine core will have it: both assume causal attention.
        enable_prefix_caching=config.cache_config.enable_prefix_caching and not non_causal,
        enable_chunked_prefill=config.scheduler_config.enable_chunked_prefill and not non_causal,
        async_scheduling=bool(config.scheduler_config.async_scheduling),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        weight_bytes=weight_bytes,
        shared_weight_bytes=parameter_bytes(side.borrowed),
        projection_bytes=parameter_bytes(_projection(side.module)) if side.role == "draft" else 0,
        kv_cache_bytes=_kv_cache_bytes(config, weight_bytes) if side.kv_cache_bytes is None else side.kv_cache_bytes,
        num_gpu_blocks_override=config.cache_config.num_gpu_blocks_override,
        kv_exports=side.kv_exports,
        groups=read_groups(config, side.role, side.specs, side.selections, side.of_target),
        constructor_writes=side.writes,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _projection(draft: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    projection = getattr(getattr(draft, "model", None), "fc", None)
    return projection.parameters() if projection is not None else ()


def _draft_vocab_size(draft: ModelConfig) -> int | None:
    size: int | None = getattr(draft.hf_config, "draft_vocab_size", None)
    return size if size != draft.get_vocab_size() else None


def _kv_cache_bytes(config: VllmConfig, weight_bytes: int) -> int:
    """What was asked for; else the engine's share of the device less the weights. Activations are not known here."""
    cache = config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return int(cache.kv_cache_memory_bytes)
    total = current_platform.get_device_total_memory()
    return max(0, int(total * cache.gpu_memory_utilization) - weight_bytes)


def _quantization(side: BuiltSide) -> QuantizationFacts:
    """By what the linear layers were built with, which is what counts, and not by what a config says of it."""
    model = side.model_config
    declared: dict[str, Any] = getattr(model.hf_config, "quantization_config", None) or {}
    checkpoint = declared.get("quant_method")
    built = _linear_quantization(side.module)
    source: Literal["checkpoint", "user", "target"] = "checkpoint"
    speculative = side.vllm_config.speculative_config
    if side.role == "draft" and speculative is not None and speculative.quantization is not None:
        source = "user"
    elif side.role == "draft" and built != checkpoint and built == side.vllm_config.model_config.quantization:
        source = "target"
    return QuantizationFacts(method=built, checkpoint=checkpoint, source=source)


def _linear_quantization(module: torch.nn.Module) -> str | None:
    for layer in module.modules():
        if isinstance(layer, LinearBase):
            config = getattr(layer.quant_method, "quant_config", None)
            if config is not None:
                return str(config.get_name())
    return None
