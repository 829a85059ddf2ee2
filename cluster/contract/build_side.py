"""Build one side's model as vLLM would, by its own loaders and with its own config, on the meta device.

Constructors run and layers register themselves; no weight is read, and no tensor has memory. What a loader does after
the constructor (`load_weights`, `process_weights_after_loading`) doesn't run.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm import EngineArgs
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from cluster.contract.facts import Role
from cluster.contract.observe import Observed, observe
from cluster.contract.read_side import BuiltSide, pairing_of
from cluster.contract.vllm_names import (
    get_kv_cache_spec,
    init_speculator,
    init_worker_distributed_environment,
    initialize_model,
    set_default_torch_dtype,
    stand_in_for_cuda,
)
from cluster.engine.target_layers import stand_ins
from cluster.engine.vllm_errors import refused_settings
from cluster.errors import UserError

_LOAD_FORMAT = "dspark_constructors_only"
_META = torch.device("meta")


@register_model_loader(_LOAD_FORMAT)
class ConstructorsOnly(BaseModelLoader):  # type: ignore[misc] # mypy doesn't follow vLLM
    """vLLM's seam for other loaders: its draft loaders then call this one for their models, too."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: the config is there."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Nothing."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        with set_default_torch_dtype(model_config.dtype), _META:
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        model.constructed = dict(model.named_parameters())
        return model.eval()


def build_side(role: Role, model: str, engine_args: Mapping[str, Any], *, scratch: Path) -> BuiltSide:
    """Build the target, or the draft with the target that it borrows from, in this process, once in its life.

    Raises:
        UserError: vLLM refuses the settings.
    """
    if current_platform.is_cpu():
        stand_in_for_cuda()
    load_general_plugins()
    config = _engine_config(engine_args)
    with set_current_vllm_config(config):
        # gloo: nothing is sent, and NCCL would take memory of the GPU.
        init_worker_distributed_environment(config, 0, f"file://{scratch / 'rendezvous'}", 0, "gloo")
    return _draft(model, config) if role == "draft" else _target(model, config)


def _engine_config(engine_args: Mapping[str, Any]) -> VllmConfig:
    with refused_settings():
        config = EngineArgs(**{**engine_args, "load_format": _LOAD_FORMAT}).create_engine_config()
    if config.speculative_config is None:
        raise UserError("no draft", "a contract is between a target and its draft", "name a draft model")
    return config


def _target(model: str, config: VllmConfig) -> BuiltSide:
    with set_current_vllm_config(config), observe(config) as observed:
        module = get_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
    return _side("target", model, config, module, observed, tuple(module.parameters()), ())


def _draft(model: str, config: VllmConfig) -> BuiltSide:
    """By the speculator's own `load_model`. Its target is built from a copy: its constructors touch nothing here."""
    of_target = copy.deepcopy(config)
    with set_current_vllm_config(of_target):
        target = get_model(vllm_config=of_target)
    with set_current_vllm_config(config), observe(config) as observed:
        of_target_layers = stand_ins(config, _META)
        speculator = init_speculator(config, _META, None)
        speculator.load_model(target)
        current_platform.update_block_size_for_backend(config)
    folder = Path(config.speculative_config.draft_model_config.model)
    weights, borrowed = _split_weights(speculator.model, _stored_names(folder))
    side = _side("draft", model, config, speculator.model, observed, weights, borrowed)
    return replace(side, of_target=frozenset(of_target_layers))


def _side(
    role: Role,
    model: str,
    config: VllmConfig,
    module: torch.nn.Module,
    observed: Observed,
    weights: tuple[torch.nn.Parameter, ...],
    borrowed: tuple[torch.nn.Parameter, ...],
) -> BuiltSide:
    speculative = config.speculative_config
    with set_current_vllm_config(config):
        specs = get_kv_cache_spec(config)
    return BuiltSide(
        role=role,
        model=model,
        model_config=speculative.draft_model_config if role == "draft" else config.model_config,
        vllm_config=config,
        pairing=pairing_of(speculative, role),
        module=module,
        specs=specs,
        selections=observed.selections,
        writes=observed.writes,
        weights=weights,
        borrowed=borrowed,
    )


def _split_weights(
    draft: torch.nn.Module, stored: frozenset[str]
) -> tuple[tuple[torch.nn.Parameter, ...], tuple[torch.nn.Parameter, ...]]:
    """The draft's weights, and those among them that it would share with its target.

    vLLM's loaders give it the target's embedding and head, unless its checkpoint has others of its own, which they
    learn from the weights. From names alone: what the checkpoint has counts as its own.
    """
    constructed: Mapping[str, torch.nn.Parameter] = draft.constructed
    weights, borrowed = dict(constructed), []
    for name, parameter in draft.named_parameters(remove_duplicate=False):
        if parameter is constructed.get(name):
            continue
        of_module = name.split(".", 1)[1] if name.startswith("model.") else name
        if not any(other.endswith(of_module) for other in stored):
            weights[name] = parameter
            borrowed.append(parameter)
    return tuple(weights.values()), tuple(borrowed)


def _stored_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in a checkpoint, from its index or its headers; empty where there are no weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    return frozenset(_headers(folder))


def _headers(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()
