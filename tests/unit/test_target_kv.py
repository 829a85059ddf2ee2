"""The target's KV as its draft gets it: rows as they were stored, pages as they lie, scales as they are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.channel.exported import ExportedMemory, MappedMemory
from cluster.contract.errors import ContractError
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from cluster.errors import UserError
from cluster.speculation.target_kv import _pages, _scale
from cluster.speculation.target_seam import PageRows, StoredRows
from tests.unit.test_contract_pairs import gemma_4_mtp

# Four blocks are enough for a request of one.
TARGET, DRAFT = (replace(side, max_model_len=16) for side in gemma_4_mtp())
CONTRACT = negotiate(TARGET, DRAFT, Policy(num_gpu_blocks=4))


class Cache:
    """An attention layer's implementation: it stores."""

    def __init__(self) -> None:
        self.stored: list[tuple[Any, ...]] = []

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self.stored.append((layer, key, value, slots))


def test_rows_are_those_of_the_last_step_in_the_order_of_the_layers() -> None:
    layers = {name: SimpleNamespace(impl=Cache()) for name in ("a", "b", "c")}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    rows = StoredRows(config, ["c", "a"])
    slots = torch.arange(5)
    for step in range(2):
        for name, layer in layers.items():
            key, value = (torch.randn(5, 2, width) + step for width in (4, 3))
            layer.impl.do_kv_cache_update(layer, key, value, slots)
            layer.last = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
            assert layer.impl.stored[-1] == (layer, key, value, slots), name
    taken = rows.take(3, {})
    assert len(taken) == 2
    assert torch.equal(taken[0], layers["c"].last[:3])
    assert torch.equal(taken[1], layers["a"].last[:3])


@pytest.mark.parametrize("place", [(0, 1, 2, 3), (0, 2, 1, 3)])  # heads before states in memory, and after them
def test_rows_of_a_gpu_are_read_back_from_where_they_were_stored(place: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    length = {0: 5, 1: 2, 2: 4, 3: 7}  # blocks, heads, states a block, and 4 elements of K beside 3 of V
    pages = torch.zeros([length[axis] for axis in place]).permute(place)
    key, value = (torch.randn(6, 2, width, generator=generator) for width in (4, 3))
    slots = torch.tensor([19, 4, 7, 8, 0, 13])
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        pages[slot // 4, :, slot % 4] = torch.cat([k, v], dim=1)
    layer = SimpleNamespace(kv_cache=pages, head_size=4)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    (rows,) = PageRows(config, ["a"]).take(5, {"a": slots})
    assert torch.equal(rows, torch.cat([key.flatten(1), value.flatten(1)], dim=1)[:5])


def test_a_quantised_cache_is_not_mirrored_on_a_gpu() -> None:
    layer = SimpleNamespace(kv_cache=torch.zeros(1, 1, 1, 2, dtype=torch.uint8), head_size=1)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    with pytest.raises(UserError, match=r"torch.uint8.*cuda_ipc"):
        PageRows(config, ["a"])


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_pages_are_where_the_contract_has_them(name: str) -> None:
    group = CONTRACT.group("target", name)
    exported = ExportedMemory(CONTRACT.pool_bytes("target"))
    offset = group.page_size_bytes  # of the next layer or block: wherever its owner put it
    mapped = MappedMemory(exported.location, CONTRACT.pool_bytes("target"))
    pages = _pages(torch.frombuffer(mapped.memory, dtype=torch.uint8), group, offset)
    size = pages.element_size()
    assert str(pages.dtype) == f"torch.{group.dtype}"
    assert (*pages.shape[:3], pages.shape[3] * size) == group.shape
    assert (*(stride * size for stride in pages.stride()[:3]), pages.stride()[3]) == group.strides
    place = offset + 3 * group.strides[0] + group.strides[1] + 5 * group.strides[2] + 7 * size
    exported.memory[place : place + size] = torch.tensor([1.5], dtype=pages.dtype).view(torch.uint8).numpy().tobytes()
    assert pages[3, 1, 5, 7] == 1.5
    assert pages.count_nonzero() == 1


def test_a_scale_is_the_targets_where_its_checkpoint_has_one_and_else_1() -> None:
    group = CONTRACT.group("target", "full")
    layer = SimpleNamespace(
        **{f"_{letter}_scale{kind}": torch.ones(()) for letter in "kv" for kind in ("", "_cpu")},
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
    with pytest.raises(ContractError) as refusal:
        _scale(layer, group, "layers.9", k_scale=0.5, v_scale=1.0)
    assert refusal.value.field == "scales"
    _scale(layer, replace(group, scales="checkpoint"), "layers.9", k_scale=0.5, v_scale=0.25)
    assert (layer._k_scale_float, float(layer._k_scale), float(layer._k_scale_cpu)) == (0.5, 0.5, 0.5)
    assert (layer._v_scale_float, float(layer._v_scale), float(layer._v_scale_cpu)) == (0.25, 0.25, 0.25)
