"""The target's keys and values in the draft's process, and the private names of vLLM 0.32 that reading them takes.

The draft reads only while its target waits in `propose`, and the target's next forward pass, which may write for a new
owner to blocks that were freed, evicted or preempted, comes after the answer: on the CPU, or on the stream that waits
for it. A target that gave up waiting takes no answer to that round: a late draft may read what the next step writes,
and its drafts are wrong then, but nobody verifies them; and it writes nothing to the target's pages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from dspark.v1.control_pb2 import SharedKV
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import _copy_target_kv_scales

from cluster.channel.cuda_exported import map_allocation
from cluster.channel.exported import MappedMemory
from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.errors import ContractError
from cluster.engine.target_layers import readers
from cluster.speculation.handshake import mirrored_layers


class TargetKV:
    """For the layers that the draft reads, as `stand_ins` built them: the target's pages, or a mirror of them."""

    def __init__(self, vllm_config: Any, contract: KVContract, shared: SharedKV, device: torch.device) -> None:
        """On a GPU, before its draft's graphs are captured, which have the pages' addresses in them.

        Raises:
            ContractError: the target scales what the contract says it doesn't.
            ChannelUnavailable: its pages can't be mapped.
        """
        self._layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._mirrored = tuple(mirrored_layers(contract))
        pool = self._map(shared, device) if contract.kv_sharing == "map" else None
        groups = {layer: group for group in contract.groups_of_draft_layers for layer in group.layers if group.shared}
        for layer in shared.layers:
            if layer.name not in self._layers:
                continue  # of a group of which the draft reads others
            group, stand_in = groups[layer.name], self._layers[layer.name]
            _scale(stand_in, group, layer.name, k_scale=layer.k_scale, v_scale=layer.v_scale)
            for reader in readers(vllm_config, layer.name):
                _copy_target_kv_scales(reader, stand_in)
                if pool is not None:  # else vLLM has bound them to the mirror
                    reader.bind_kv_cache(_pages(pool, group, layer.offset))

    def _map(self, shared: SharedKV, device: torch.device) -> torch.Tensor:
        """The target's pool, as bytes."""
        if device.type == "cuda":
            return map_allocation(shared.location, shared.num_bytes, device)
        self._mapped = MappedMemory(shared.location, shared.num_bytes)  # no view keeps it
        return torch.frombuffer(self._mapped.memory, dtype=torch.uint8)

    def store(self, rows: Sequence[torch.Tensor], slot_mappings: Mapping[str, torch.Tensor]) -> None:
        """Write a round's rows, [T, elements of K and V] for each mirrored layer, as the target's layer did."""
        for name, both in zip(self._mirrored, rows, strict=True):
            layer = self._layers[name]
            split = layer.num_kv_heads * layer.head_size
            key = both[:, :split].unflatten(1, (layer.num_kv_heads, layer.head_size))
            value = both[:, split:].unflatten(1, (layer.num_kv_heads, layer.head_size_v))
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slot_mappings[name])


def _pages(pool: torch.Tensor, group: GroupContract, offset: int) -> torch.Tensor:
    """The layer's [B, H, N, C] in the target's pool, with the contract's shape and strides."""
    elements = pool.view(getattr(torch, group.dtype))
    size = elements.element_size()
    blocks, heads, states, content = group.shape
    *strides, _ = group.strides
    return elements.as_strided(
        (blocks, heads, states, content // size), (*(stride // size for stride in strides), 1), offset // size
    )


def _scale(stand_in: Any, group: GroupContract, name: str, *, k_scale: float, v_scale: float) -> None:
    """The target's scales, known once it has loaded its weights."""
    if group.scales != "checkpoint" and (k_scale, v_scale) != (1.0, 1.0):
        raise ContractError(
            "scales",
            target=f"{k_scale} and {v_scale} for {name}",
            draft=f"{group.scales}, by the contract",
            reason="the draft would read the target's keys and values in another scale than they were stored in",
            remedy="let both sides read the same model config",
        )
    for letter, scale in (("k", k_scale), ("v", v_scale)):
        getattr(stand_in, f"_{letter}_scale").fill_(scale)
        getattr(stand_in, f"_{letter}_scale_cpu").fill_(scale)
        setattr(stand_in, f"_{letter}_scale_float", scale)
