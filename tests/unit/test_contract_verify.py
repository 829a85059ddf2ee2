"""What was allocated against the contract, with stand-ins for vLLM's plans and torch's tensors."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.verify import verify_allocation, verify_plan
from tests.unit.test_contract_pairs import backend, contract_of, deepseek_v4, gemma_4_mtp, group, qwen3_8b


@dataclass
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int = 1

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.size


@dataclass
class Spec:
    block_size: int
    num_heads: int
    num_states: int
    state_content_size_bytes: int
    page_size_bytes: int
    dtype: str
    cache_dtype_str: str | None = None


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class PlannedTensor:
    size: int
    layers: list[str]
    layer_stride: int
    offset: int = 0


@dataclass
class Plan:
    num_blocks: int
    kv_cache_layout: str | None
    kv_cache_groups: list[Any]
    kv_cache_tensors: list[Any]


QWEN = contract_of(qwen3_8b())
DSV4 = contract_of(deepseek_v4())
SIZES = {"torch.bfloat16": 2, "torch.float8_e4m3fn": 1, "torch.uint8": 1}


def tensors(contract: KVContract) -> dict[str, Tensor]:
    """The target's tensors, as the contract has them."""
    (only,) = contract.groups_of("target")
    dtype = f"torch.{only.dtype}"
    size = SIZES[dtype]
    shape = (*only.shape[:3], only.shape[3] // size)
    strides = (*(stride // size for stride in only.strides[:3]), 1)
    return {layer: Tensor(dtype, shape, strides, size) for layer in only.layers}


def plan(contract: KVContract) -> Plan:
    (only,) = contract.groups_of("target")
    _, heads, states, content = only.shape
    spec = Spec(only.block_size, heads, states, content, only.page_size_bytes, f"torch.{only.dtype}")
    layer_bytes = contract.num_blocks * only.page_size_bytes
    tensor = PlannedTensor(contract.num_blocks * contract.target.bytes_per_block, list(only.layers), layer_bytes)
    return Plan(contract.num_blocks, contract.target.layout, [Group(list(only.layers), spec)], [tensor])


def one_changed(contract: KVContract, **change: Any) -> dict[str, Tensor]:
    changed = tensors(contract)
    layer = sorted(changed)[-1]
    return changed | {layer: replace(changed[layer], **change)}


def test_what_the_contract_says_is_accepted() -> None:
    for contract in (QWEN, DSV4):
        verify_plan(contract, "target", plan(contract))
        verify_allocation(contract, "target", tensors(contract))


def test_a_row_of_another_width_is_said_in_bytes_a_token() -> None:
    """vLLM #52288, had it come so far: allocated for fp8_ds_mla, read as fp8."""
    wide = one_changed(DSV4, dtype="torch.uint8", shape=(DSV4.num_blocks, 1, 64, 584), strides=(64 * 584, 584, 584, 1))
    with pytest.raises(ContractViolation, match="584 bytes a token allocated, 512 expected") as violation:
        verify_allocation(DSV4, "target", wide, cache_dtype="fp8_ds_mla")
    assert "(fp8_ds_mla against fp8)" in str(violation.value)
    assert (violation.value.old, violation.value.new) == (512, 584)


def test_a_plan_of_another_width_is_refused_before_anything_is_allocated() -> None:
    wide = plan(DSV4)
    wide.kv_cache_groups[0].kv_cache_spec.state_content_size_bytes = 584
    wide.kv_cache_groups[0].kv_cache_spec.cache_dtype_str = "fp8_ds_mla"
    with pytest.raises(ContractViolation, match=r"584 bytes .* 512 expected \(fp8_ds_mla against fp8\)"):
        verify_plan(DSV4, "target", wide)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "torch.float16"}, "dtype"),
        ({"shape": (QWEN.num_blocks - 1, 8, 16, 256)}, "number of blocks"),
        ({"shape": (QWEN.num_blocks, 8, 32, 256)}, "shape"),
        ({"shape": (QWEN.num_blocks, 4, 16, 512)}, "shape"),
        ({"shape": (QWEN.num_blocks, 8, 4096)}, "shape"),
        ({"strides": (32_768, 4096, 256, 1)}, "strides"),
    ],
)
def test_each_part_of_a_tensors_geometry_is_compared(change: Any, named: str) -> None:
    with pytest.raises(ContractViolation) as violation:
        verify_allocation(QWEN, "target", one_changed(QWEN, **change))
    assert violation.value.field.startswith(named)
    assert "full.layers.9.self_attn.attn (full)" in violation.value.field


def test_a_tensor_of_an_mla_layer_may_have_lost_its_only_head() -> None:
    flat = {
        layer: replace(
            tensor, shape=(tensor.shape[0], *tensor.shape[2:]), strides=(tensor.strides[0], *tensor.strides[2:])
        )
        for layer, tensor in tensors(DSV4).items()
    }
    verify_allocation(DSV4, "target", flat)


def test_the_stride_of_an_axis_of_one_does_not_matter() -> None:
    (block, _, state, content) = tensors(DSV4)["swa.layers.0.self_attn.attn"].strides
    verify_allocation(DSV4, "target", one_changed(DSV4, strides=(block, 1, state, content)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_blocks": QWEN.num_blocks + 1}, "num_blocks"),
        ({"kv_cache_layout": "LBHNC"}, "kv_cache_layout"),
        ({"kv_cache_layout": None}, "kv_cache_layout"),
        ({"kv_cache_groups": []}, "layers"),
    ],
)
def test_each_part_of_a_plan_is_compared(change: Any, field: str) -> None:
    with pytest.raises(ContractViolation) as violation:
        verify_plan(QWEN, "target", replace(plan(QWEN), **change))
    assert violation.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_size": 32}, "block_size"),
        ({"page_size_bytes": 65_600}, "page_size_bytes"),
        ({"num_heads": 4}, "row_bytes"),
    ],
)
def test_each_part_of_a_spec_is_compared(change: Any, field: str) -> None:
    wrong = plan(QWEN)
    wrong.kv_cache_groups[0].kv_cache_spec = replace(wrong.kv_cache_groups[0].kv_cache_spec, **change)
    with pytest.raises(ContractViolation) as violation:
        verify_plan(QWEN, "target", wrong)
    assert violation.value.field.startswith(field)


def test_a_pool_of_another_size_is_noticed() -> None:
    wrong = plan(QWEN)
    wrong.kv_cache_tensors[0].size -= 1
    with pytest.raises(ContractViolation, match="size of the pool"):
        verify_plan(QWEN, "target", wrong)


def test_draft_groups_on_one_table_may_not_overlay_each_other_as_vllm_would_have_it() -> None:
    target, draft = qwen3_8b()
    window = group("window", "draft", backend("FLASH_ATTN"), layers=5, kind="sliding_window", sliding_window=64)
    contract = contract_of((target, replace(draft, groups=(*draft.groups, window))))
    spec = Spec(16, 8, 16, 512, 65_536, "torch.bfloat16")
    size = contract.num_blocks * contract.draft.bytes_per_block
    layer_bytes = contract.num_blocks * 65_536
    names = {each.name: list(each.layers) for each in contract.groups_of("draft")}

    def hosted(offset: int) -> Plan:
        groups = [Group(layers, spec) for layers in names.values()]
        places = [
            PlannedTensor(size, names["draft"], layer_bytes),
            PlannedTensor(size, names["window"], layer_bytes, offset),
        ]
        return Plan(contract.num_blocks, contract.draft.layout, groups, places)

    verify_plan(contract, "draft", hosted(5 * layer_bytes))
    with pytest.raises(ContractViolation, match="though both are addressed by block table full"):
        verify_plan(contract, "draft", hosted(0))


def test_a_layer_that_shares_the_tensor_of_another_is_no_stranger() -> None:
    shared = tensors(QWEN)
    shared["full.layers.36.self_attn.attn"] = shared["full.layers.35.self_attn.attn"]
    verify_allocation(QWEN, "target", shared)


def test_a_layer_outside_the_contract_gets_no_cache_unnoticed() -> None:
    stray = tensors(QWEN)
    stray["draft.layers.0.self_attn.attn"] = replace(next(iter(stray.values())))
    with pytest.raises(ContractViolation, match="layers outside the contract"):
        verify_allocation(QWEN, "target", stray)


def test_a_draft_that_reads_the_targets_cache_allocates_nothing() -> None:
    contract = contract_of(gemma_4_mtp())
    verify_allocation(contract, "draft", {})
