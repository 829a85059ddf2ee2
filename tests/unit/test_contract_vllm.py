"""The contract against vLLM itself: its real configs under the seal, its arithmetic, its views of real memory.

Importing vLLM takes most of this module's time; nothing here builds a model or an engine.
"""

import copy
import dataclasses
import pickle
import typing
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from vllm.config import AttentionConfig, CacheConfig
from vllm.config.utils import replace
from vllm.models.deepseek_v4.attention import _resolve_dsv4_kv_cache_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, record_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from cluster.contract import facts, geometry
from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.facts import FormatFacts, GroupFacts
from cluster.contract.phases import PERMITTED, SEALED, Phase
from cluster.contract.seal import Seal, record_writes
from cluster.contract.verify import verify_allocation, verify_plan
from tests.unit.test_contract_pairs import backend, contract_of, group, side

# Names


def test_kinds_and_layouts_are_vllms() -> None:
    kinds = {kind.value for kind in KVCacheSpecKind} - {"unknown"}
    assert set(typing.get_args(facts.KVCacheSpecKind)) == kinds
    assert list(geometry.ENUM_ORDER) == [layout.name for layout in KVCacheLayout]


def test_every_sealed_and_every_permitted_field_exists() -> None:
    classes = {name: name.title().replace("_", "") for name in SEALED} | {"vllm_config": "VllmConfig"}
    real = {
        name: {field.name for field in dataclasses.fields(getattr(vllm.config, cls))} for name, cls in classes.items()
    }
    for name, fields in SEALED.items():
        assert (fields or set()) <= real[name]
    for permits in PERMITTED.values():
        for key in permits:
            config, _, field = key.partition(".")
            assert field in real[config]


# The seal on real configs


def seal_of(config: CacheConfig, **fixed: object) -> Seal:
    return Seal({"cache_config": config}, fixed={f"cache_config.{key}": value for key, value in fixed.items()})


def test_deepseek_v4s_own_rewriting_of_a_cache_config_is_caught() -> None:
    class DeepseekV4FlashMLAAttention:
        def __init__(self, cache_config: CacheConfig) -> None:
            _resolve_dsv4_kv_cache_dtype(True, cache_config.cache_dtype, cache_config)

    config = CacheConfig(cache_dtype="fp8")
    with (
        record_writes({"cache_config": copy.deepcopy(config)}) as none,
        record_writes({"cache_config": config}) as writes,
    ):
        DeepseekV4FlashMLAAttention(config)
    assert (none, len(writes)) == ([], 1)
    assert (writes[0].field, writes[0].old, writes[0].new) == ("cache_config.cache_dtype", "fp8", "fp8_ds_mla")
    assert writes[0].location.startswith("vllm/models/deepseek_v4/attention.py:")

    config = CacheConfig(cache_dtype="fp8")
    with seal_of(config), pytest.raises(ContractViolation, match="_resolve_dsv4_kv_cache_dtype"):
        DeepseekV4FlashMLAAttention(config)
    assert config.cache_dtype == "fp8"


def test_a_sealed_config_is_copied_replaced_pickled_and_compared_as_any_other() -> None:
    config, attention = CacheConfig(block_size=32), AttentionConfig(backend="flash_attn")  # type: ignore[arg-type]
    config.kv_cache_layout = "LBNHC"
    with Seal({"cache_config": config, "attention_config": attention}, fixed={}):
        for sealed in (config, attention):
            for twin in (
                copy.copy(sealed),
                copy.deepcopy(sealed),
                pickle.loads(pickle.dumps(sealed)),  # noqa: S301 - our own bytes
            ):
                assert type(twin) is type(sealed)
                assert twin == sealed
                assert twin.compute_hash() == sealed.compute_hash()
        other = replace(config, cache_dtype="fp8")  # as vLLM builds a draft's config
        other.cache_dtype = "bfloat16"
        dataclasses.replace(attention, backend=None).backend = AttentionBackendEnum.TRITON_ATTN
        with pytest.raises(ContractViolation, match=r"was FLASH_ATTN, and .* wrote TRITON_ATTN"):
            attention.backend = AttentionBackendEnum.TRITON_ATTN
        with pytest.raises(ContractViolation):
            config.cache_dtype = "fp8"
    assert (config.cache_dtype, other.cache_dtype) == ("auto", "bfloat16")


def test_vllm_may_record_the_contracts_layout_and_no_other() -> None:
    config = CacheConfig()
    with seal_of(config, kv_cache_layout="LBHNC") as seal:
        with pytest.raises(ContractViolation, match="the contract fixes LBHNC"):
            record_kv_cache_layout(config, "LBNHC")
        record_kv_cache_layout(config, "LBHNC")
        seal.enter(Phase.ALLOCATING)
        record_kv_cache_layout(config, "LBHNC")


# Arithmetic: specs of vLLM against the facts that a probe would read off them


def format_of(spec: Any) -> FormatFacts:
    return FormatFacts(
        cache_dtype=getattr(spec, "cache_dtype_str", None) or "auto",
        dtype=str(spec.dtype).removeprefix("torch."),
        num_heads=spec.num_heads,
        state_content_bytes=spec.state_content_size_bytes,
        tokens_per_state=int(spec.tokens_per_state),
        page_size_padded=spec.page_size_padded,
        block_stride_alignment=spec.get_block_stride_alignment(),
    )


def group_of(name: str, layers: Sequence[str], spec: Any, table: str | None, **more: Any) -> GroupFacts:
    window = getattr(spec, "sliding_window", None)
    mla = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    kind = {
        (False, False): "full_attention",
        (True, False): "mla_attention",
        (False, True): "sliding_window",
        (True, True): "sliding_window_mla",
    }[mla, window is not None]
    sizes = (facts.BlockSize(size=16, multiple=True),)
    return dataclasses.replace(
        group(name, "target", backend("A", format_of(spec), sizes=sizes, **more)),
        layers=tuple(layers),
        kind=kind,  # type: ignore[arg-type]
        block_size=spec.block_size,
        sliding_window=window,
        block_table=table,
    )


BF16: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **BF16)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=64, **BF16)
FP32 = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32)
DSV4: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla"}
PACKED: dict[str, Any] = {"state_content_bytes": 584, "alignment": 576, "model_version": "deepseek_v4"}
COMPRESSED = MLAAttentionSpec(block_size=256, tokens_per_state=4, **DSV4, **PACKED)
SWA = SlidingWindowMLASpec(block_size=64, sliding_window=128, **DSV4, **PACKED)
ALIGNED = FullAttentionSpec(block_size=16, block_stride_alignment=3 << 12, **BF16)

POOLS: dict[str, dict[str, KVCacheSpec]] = {
    "one group": {"a.0": FULL, "a.1": FULL, "a.2": FULL},
    "float32": {"a.0": FP32},
    "two tables": {"a.0": FULL, "a.1": FULL, "w.0": WINDOW},
    "a padded block": {"a.0": ALIGNED, "a.1": ALIGNED},
    "one table of two specs": {
        "c.0": COMPRESSED,
        "c.1": COMPRESSED,
        "d.0": dataclasses.replace(COMPRESSED, alignment=512),
    },
    "tables of unlike pages": {"c.0": COMPRESSED, "s.0": SWA, "s.1": SWA},
}
LAYOUTS = {
    "one group": ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"],
    "float32": ["LBHNC", "BLHNC"],
    "two tables": ["LBNHC", "BLNHC"],
    "a padded block": ["LBNHC", "BLNHC"],
    "one table of two specs": ["LBNHC", "BLHNC"],
    "tables of unlike pages": ["BLHNC"],
}
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
NUM_BLOCKS = 7


def stub(layout: str) -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        model_config=SimpleNamespace(max_model_len=4096),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=2 * 8192,
    )


def tables_of(pool: dict[str, KVCacheSpec]) -> dict[str, dict[str, KVCacheSpec]]:
    """Layers of one letter are one group of vLLM, but c and d share one."""
    tables: dict[str, dict[str, KVCacheSpec]] = {}
    for layer, spec in pool.items():
        tables.setdefault("c" if layer[0] == "d" else layer[0], {})[layer] = spec
    return tables


def vllm_plan(name: str, layout: str, memory: int) -> KVCacheConfig:
    groups = []
    for layers in tables_of(POOLS[name]).values():
        specs = list(layers.values())
        uniform = all(spec == specs[0] for spec in specs)
        spec = specs[0] if uniform else UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=layers)
        groups.append(KVCacheGroupSpec(layer_names=list(layers), kv_cache_spec=spec))
    plan = get_kv_cache_config_from_groups(stub(layout), groups, memory)
    plan.kv_cache_layout = layout
    return plan


def contract_for(name: str, layout: str, memory: int) -> KVContract:
    groups = []
    for table, layers in tables_of(POOLS[name]).items():
        for letter in sorted({layer[0] for layer in layers}):
            names = [layer for layer in layers if layer[0] == letter]
            groups.append(group_of(letter, names, layers[names[0]], table, layouts=(layout,)))
    draft = group("draft", "draft", backend("A"), kind="sliding_window", sliding_window=32, layers=1)
    more: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 1}
    return contract_of((side("target", *groups, kv_cache_bytes=memory, **more), side("draft", draft, **more)))


def pool_bytes(name: str, layout: str) -> int:
    plan = vllm_plan(name, layout, 1 << 30)
    return plan.kv_cache_tensors[0].size // plan.num_blocks * NUM_BLOCKS


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_what_vllm_plans_and_allocates_is_what_the_contract_says(name: str, layout: str) -> None:
    memory = pool_bytes(name, layout) + 1
    plan, contract = vllm_plan(name, layout, memory), contract_for(name, layout, memory)
    assert plan.num_blocks == contract.num_blocks == NUM_BLOCKS
    assert plan.kv_cache_tensors[0].size == contract.target.bytes_per_block * NUM_BLOCKS
    verify_plan(contract, "target", plan)
    tensors = allocate_kv_cache(plan, torch.device("cpu"), KVCacheLayout[layout])
    verify_allocation(contract, "target", tensors)


def test_blocks_that_the_kernel_sees_in_pieces_are_views_as_vllm_makes_them() -> None:
    spec = FullAttentionSpec(block_size=128, **BF16)
    plan = get_kv_cache_config_from_groups(stub("LBHNC"), [KVCacheGroupSpec(["a.0", "a.1"], spec)], 1 << 22)
    tensors = allocate_kv_cache(plan, torch.device("cpu"), KVCacheLayout.LBHNC, [64])
    owner = group_of("a", ["a.0", "a.1"], spec, None, layouts=("LBHNC",), splits_blocks=True)
    kernel = dataclasses.replace(owner.backends[0], kernel_block_sizes=(facts.BlockSize(size=64),))
    target = side("target", dataclasses.replace(owner, backends=(kernel,)), kv_cache_bytes=1 << 22, max_model_len=128)
    contract = contract_of((target, side("draft", group("draft", "draft", backend("A"), layers=1), max_model_len=128)))
    assert contract.group("target", "a").kernel_block_size == 64
    verify_allocation(contract, "target", tensors)


def test_a_pool_in_another_layout_or_dtype_is_noticed() -> None:
    memory = pool_bytes("one group", "LBNHC")
    contract = contract_for("one group", "LBNHC", memory)
    plan = vllm_plan("one group", "LBHNC", memory)
    with pytest.raises(ContractViolation, match="kv_cache_layout is LBHNC, not LBNHC"):
        verify_plan(contract, "target", plan)
    tensors = allocate_kv_cache(plan, torch.device("cpu"), KVCacheLayout.LBHNC)
    with pytest.raises(ContractViolation, match="strides"):
        verify_allocation(contract, "target", tensors)
    right = allocate_kv_cache(vllm_plan("one group", "LBNHC", memory), torch.device("cpu"), KVCacheLayout.LBNHC)
    with pytest.raises(ContractViolation, match="dtype"):
        verify_allocation(contract, "target", {name: tensor.view(torch.float16) for name, tensor in right.items()})


@pytest.mark.parametrize("name", POOLS)
def test_a_request_holds_as_many_blocks_as_vllm_counts(name: str) -> None:
    layout = LAYOUTS[name][-1]
    plan = vllm_plan(name, layout, 1 << 30)
    pool = [
        geometry.Placed(
            table=table,
            num_layers=1,
            block_size=spec.block_size,
            backend=backend("A"),
            format=format_of(spec),
            sliding_window=getattr(spec, "sliding_window", None),
        )
        for table, layers in tables_of(POOLS[name]).items()
        for spec in layers.values()
    ]
    held = geometry.blocks_per_request(pool, num_tokens=4096, max_in_flight_tokens=2 * 8192)
    assert plan.num_blocks / held == get_max_concurrency_for_kv_cache_config(stub(layout), plan)


@pytest.mark.parametrize(
    "declared",
    [
        [None],
        [("LBHNC", "BLHNC")],
        [("LBHNC", "BLHNC"), None],
        [("LBHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("BLHNC", "LBHNC", "LBNHC")],
        [("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")],
    ],
)
def test_layouts_are_preferred_in_vllms_order(declared: list[Any]) -> None:
    def vllm_backend(names: Any) -> Any:
        layouts = tuple(KVCacheLayout[name] for name in names) if names else None
        return SimpleNamespace(supported_kv_cache_layouts=lambda: layouts)

    theirs = [layout.name for layout in get_supported_kv_cache_layouts(map(vllm_backend, declared))]
    pool = [
        geometry.Placed(
            table="t",
            num_layers=1,
            block_size=16,
            backend=backend(f"B{i}", layouts=names or ()),
            format=format_of(FULL),
        )
        for i, names in enumerate(declared)
    ]
    assert geometry.supported_layouts(pool) == theirs
