"""Every private name of vLLM 0.32 that the target's side of the split uses, but for the hook (`speculator_hook`)."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from cluster.errors import UserError
from cluster.speculation.checkpoint import DUMMY, fill_with_dummies, load_parameters, read_tensors
from cluster.speculation.rank_gate import RankGate

__all__ = ["DraftlessSpeculator", "FusedStates", "PageRows", "StoredRows", "kv_rows"]


class DraftlessSpeculator(DraftModelSpeculator):
    """What vLLM's runner takes for the speculator of a draft model, of which nothing attends here."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.attn_groups: list[Any] = []  # the runner asks for the draft's: there are none here
        self._gate = _gate_of_ranks(device)

    def of_first_rank(self, drafts: torch.Tensor) -> torch.Tensor:
        """`drafts` with what the first tensor-parallel rank has in it; each rank calls this once a round. On a GPU it
        is the stream that waits, and not the CPU."""
        if self._gate is not None:
            self._gate.enter()
        broadcast: torch.Tensor = get_tp_group().broadcast(drafts)
        return broadcast

    def close(self) -> None:
        """No round comes any more. There is nothing to let go of, but for a rank that has the draft."""

    def leave_ranks(self) -> None:
        """When no step comes any more, and the stream has passed all there were."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing here is captured."""

    def capture(self) -> None:
        """Nothing here is captured."""


def _gate_of_ranks(device: torch.device) -> RankGate | None:
    """For the streams of all tensor-parallel ranks, each of which asks for it at the same point; None where there is
    one rank, or no stream."""
    group = get_tp_group()
    if group.world_size == 1 or device.type == "cpu":
        return None
    gate = RankGate.first() if group.rank_in_group == 0 else None
    name = ["" if gate is None else gate.name]
    torch.distributed.broadcast_object_list(name, src=group.ranks[0], group=group.cpu_group)
    gate = gate or RankGate.further(*name)
    torch.distributed.barrier(group=group.cpu_group)
    gate.unlink()
    return gate


class StoredRows:
    """What the target's layers stored in their caches last: as it was given to vLLM's `do_kv_cache_update`.

    Not read back from the pages: in those of a CPU no row of a token lies in one piece.
    """

    def __init__(self, vllm_config: Any, layers: Iterable[str]) -> None:
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layers = tuple(layers)
        for name in self._layers:
            self._watch(name, vllm_config.compilation_config.static_forward_context[name].impl)

    def take(self, num_tokens: int, slot_mappings: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        """For each layer, [T, elements of K and V]: of the forward pass before this, whose tensors are let go."""
        rows = tuple(
            torch.cat([part[:num_tokens].flatten(1) for part in self._rows[name]], dim=1) for name in self._layers
        )
        self._rows.clear()
        return rows

    def _watch(self, name: str, impl: Any) -> None:
        update = impl.do_kv_cache_update

        def watched(layer: Any, key: torch.Tensor, value: torch.Tensor, *where: Any) -> None:
            self._rows[name] = key, value
            update(layer, key, value, *where)

        impl.do_kv_cache_update = watched


class PageRows:
    """The same of a GPU, read back from its pages: a graph that stores runs no code of ours."""

    def __init__(self, vllm_config: Any, layers: Iterable[str]) -> None:
        """
        Raises:
            UserError: the cache is quantised. Its rows would be quantised again where they go.
        """
        context = vllm_config.compilation_config.static_forward_context
        self._layers = {name: context[name] for name in layers}
        for name, layer in self._layers.items():
            if layer.kv_cache.dtype != vllm_config.model_config.dtype:
                raise UserError(
                    f"a KV cache of {layer.kv_cache.dtype}",
                    f"the draft keeps a mirror of {name}, on GPUs so far only of a cache that isn't quantised",
                    "take the cuda_ipc channel, over which it maps the target's, or leave kv_cache_dtype out",
                )

    def take(self, num_tokens: int, slot_mappings: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As of StoredRows. `slot_mappings` are the forward pass's, by layer."""
        return tuple(
            _read_rows(layer.kv_cache, slot_mappings[name][:num_tokens], layer.head_size)
            for name, layer in self._layers.items()
        )


def _read_rows(pages: torch.Tensor, slots: torch.Tensor, head_size: int) -> torch.Tensor:
    """Of pages [B, H, N, K beside V] the rows of these slots: [T, all K before all V]."""
    num_states = pages.shape[2]
    both = pages[slots // num_states, :, slots % num_states]
    return torch.cat([both[..., :head_size].flatten(1), both[..., head_size:].flatten(1)], dim=1)


def kv_rows(vllm_config: Any, layers: Iterable[str], device: torch.device) -> StoredRows | PageRows:
    """How a target on this device tells what it has stored in these layers."""
    kind = StoredRows if device.type == "cpu" else PageRows
    return kind(vllm_config, layers)


_OURS = re.compile(r"(?:.*\.)?(?P<parameter>(?P<module>fc|input_norm|fc_norm)\.[\w.]+)")


class FusedStates(nn.Module):
    """The draft's `fc` and nothing else of it: a target's auxiliary states [T, L·H_target] to the draft's [T, H].

    It runs on this side because its output is a fifth of its input, and it is built and loaded as the draft's model
    does it, so that the draft gets the same bits. An EAGLE-3 draft may have norms before it, over all and over each.
    """

    def __init__(self, vllm_config: Any, target_model: Any, device: torch.device) -> None:
        super().__init__()
        speculation = vllm_config.speculative_config
        draft = speculation.draft_model_config
        config = draft.hf_config
        layers = get_eagle3_aux_layers_from_config(speculation)
        self._count = len(layers or target_model.get_eagle3_default_aux_hidden_state_layers())
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        nested = getattr(config, "eagle_config", None) or {}
        with set_default_torch_dtype(vllm_config.model_config.dtype), device:
            if nested.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
                self.input_norm = RMSNorm(width * self._count, eps=config.rms_norm_eps)
            if getattr(config, "fc_norm", False):
                norms = (RMSNorm(width, eps=config.rms_norm_eps) for _ in range(self._count))
                self.fc_norm = nn.ModuleList(norms)
            self.fc = ReplicatedLinear(
                input_size=width * self._count,
                output_size=draft.get_hidden_size(),
                bias=False,
                params_dtype=vllm_config.model_config.dtype,
                quant_config=get_draft_quant_config(vllm_config),
                prefix="model.fc",
                return_bias=False,
            )
        folder = Path(draft.model)
        if vllm_config.load_config.load_format == DUMMY:
            fill_with_dummies(self)
        else:
            load_parameters(self, read_tensors(folder, self._parameter), checkpoint=folder)
        process_weights_after_loading(self, draft, device)

    def forward(self, aux_hidden_states: list[torch.Tensor]) -> torch.Tensor:
        states = torch.cat(aux_hidden_states, dim=-1)
        if hasattr(self, "input_norm"):
            states = self.input_norm(states)
        if hasattr(self, "fc_norm"):
            parts = zip(self.fc_norm, states.chunk(self._count, dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        fused: torch.Tensor = self.fc(states)
        return fused

    def _parameter(self, stored: str) -> str | None:
        match = _OURS.fullmatch(stored)
        return match["parameter"] if match and hasattr(self, match["module"]) else None
