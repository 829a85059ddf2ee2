"""A sealed config keeps its values and names whoever wants to change them; to everything else it is as before."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cluster.contract import watch
from cluster.contract.errors import ContractViolation, as_text
from cluster.contract.facts import ConfigWrite
from cluster.contract.phases import PERMITTED, SEALED, Phase
from cluster.contract.seal import Seal, covered, fixed_values, record_writes
from tests.unit.test_contract_pairs import contract_of, qwen3_8b


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    block_size: int = 16
    kv_cache_layout: str | None = None
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True
    effective_attention_block_size: int | None = None
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)


@dataclass
class ModelConfig:
    max_model_len: int = 40_960
    seed: int = 0


class DraftAttention:
    """As vLLM's DeepseekV4FlashMLAAttention: a helper of its base class rewrites the config that it is given."""

    def __init__(self, cache_config: Any) -> None:
        resolve_cache_dtype(cache_config)


class NoisyDraftAttention(DraftAttention):
    pass


def resolve_cache_dtype(cache_config: Any) -> None:
    cache_config.cache_dtype = "fp8_ds_mla"


class Plain:
    """With the repr of `object`, which has its address."""


def test_a_values_text_is_the_same_in_every_process() -> None:
    assert as_text(Plain()) == as_text(Plain()) == "Plain"
    assert [as_text(value) for value in (None, 3, [1], "fp8", Phase.SERVING)] == ["None", "3", "[1]", "fp8", "SERVING"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """An engine of other tests may hold its seal meanwhile."""
    watched, guards = set(watch._watched), set(watch._guards)
    yield
    assert set(watch._watched) <= watched, "a test left its seal on"
    assert set(watch._guards) <= guards
    assert "__setattr__" not in vars(CacheConfig)


@pytest.fixture
def cache_config() -> CacheConfig:
    return CacheConfig()


FIXED = {
    "cache_config.kv_cache_layout": "LBNHC",
    "cache_config.num_gpu_blocks": 1000,
    "cache_config.block_size": 16,
    "cache_config.enable_prefix_caching": True,
    "model_config.max_model_len": 40_960,
}


def sealed(cache_config: CacheConfig, phase: Phase = Phase.PLANNING) -> Seal:
    return Seal({"cache_config": cache_config}, fixed=FIXED, phase=phase)


def test_a_write_to_a_sealed_field_raises_and_names_field_values_class_and_line(cache_config: CacheConfig) -> None:
    with sealed(cache_config), pytest.raises(ContractViolation) as violation:
        NoisyDraftAttention(cache_config)
    error = violation.value
    assert (error.field, error.old, error.new) == ("cache_config.cache_dtype", "auto", "fp8_ds_mla")
    assert error.writer is not None
    assert error.writer.class_name == "NoisyDraftAttention"
    assert error.writer.function == "resolve_cache_dtype"
    line = resolve_cache_dtype.__code__.co_firstlineno + 1
    assert error.writer.location == f"tests/unit/test_contract_seal.py:{line}"
    assert "NoisyDraftAttention in resolve_cache_dtype" in str(error)
    assert cache_config.cache_dtype == "auto"


def test_a_write_of_the_same_value_passes(cache_config: CacheConfig) -> None:
    with sealed(cache_config, Phase.SERVING):
        cache_config.cache_dtype = "auto"
        cache_config.kv_cache_dtype_skip_layers = []


def test_a_released_config_can_be_written(cache_config: CacheConfig) -> None:
    with sealed(cache_config):
        pass
    cache_config.cache_dtype = "fp8"
    assert cache_config.cache_dtype == "fp8"


def test_another_config_of_the_same_class_can_be_written_meanwhile(cache_config: CacheConfig) -> None:
    other = CacheConfig()
    with sealed(cache_config):
        other.cache_dtype = "fp8"
    assert other.cache_dtype == "fp8"


def test_copies_of_every_kind_are_equal_and_unsealed(cache_config: CacheConfig) -> None:
    with sealed(cache_config):
        copies = (
            copy.copy(cache_config),
            copy.deepcopy(cache_config),
            replace(cache_config),
            pickle.loads(pickle.dumps(cache_config)),  # noqa: S301 - our own bytes
        )
        for each in copies:
            assert type(each) is CacheConfig
            assert each == cache_config
            assert vars(each) == vars(cache_config)
            each.cache_dtype = "fp8"
            assert each.cache_dtype == "fp8"
        assert replace(cache_config, cache_dtype="fp8").cache_dtype == "fp8"
    assert cache_config.cache_dtype == "auto"


def test_a_config_that_dies_watched_leaves_nothing_behind() -> None:
    mortal: Any = CacheConfig()
    address = id(mortal)
    watch.watch(mortal, lambda *_: None)
    assert "__setattr__" in vars(CacheConfig)
    del mortal
    assert address not in watch._watched
    assert "__setattr__" not in vars(CacheConfig)


def test_a_config_is_sealed_once(cache_config: CacheConfig) -> None:
    other = CacheConfig()
    with sealed(cache_config), pytest.raises(ValueError, match="watched already"):
        Seal({"attention_config": other, "cache_config": cache_config}, fixed={})
    other.cache_dtype = "fp8"  # and the seal that failed let go of what it had


def test_a_class_with_its_own_setattr_keeps_it() -> None:
    class Strict(CacheConfig):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, "bfloat16" if value == "bf16" else value)

    own = Strict.__dict__["__setattr__"]
    config, base = Strict(), CacheConfig()
    with record_writes({"strict": config, "base": base}) as writes:
        config.cache_dtype = "bf16"
        base.cache_dtype = "fp8"
    assert config.cache_dtype == "bfloat16"
    assert [(write.field, write.new) for write in writes] == [
        ("strict.cache_dtype", "bf16"),
        ("base.cache_dtype", "fp8"),
    ]
    assert Strict.__dict__["__setattr__"] is own


# Phases


def test_every_permit_is_for_a_field_that_is_sealed_and_has_a_reason() -> None:
    assert set(PERMITTED) == set(Phase)
    for permits in PERMITTED.values():
        for key, permit in permits.items():
            config, _, name = key.partition(".")
            fields = SEALED[config]
            assert fields is None or name in fields
            assert permit.reason


def test_vllms_own_writes_pass_in_their_phases_and_no_later(cache_config: CacheConfig) -> None:
    with sealed(cache_config) as seal:
        cache_config.num_gpu_blocks = 3  # while graphs are profiled
        cache_config.num_gpu_blocks = None
        cache_config.kv_cache_layout = "LBNHC"
        seal.enter(Phase.ALLOCATING)
        cache_config.num_gpu_blocks = 1000
        seal.enter(Phase.SERVING)
        cache_config.effective_attention_block_size = 16
        for name, value in (("num_gpu_blocks", 999), ("kv_cache_layout", "LBHNC"), ("block_size", 32)):
            with pytest.raises(ContractViolation, match="sealed while serving"):
                setattr(cache_config, name, value)
        seal.enter(Phase.SHUTDOWN)
        cache_config.num_gpu_blocks = None


def test_a_shutdown_may_come_after_a_failure_and_twice(cache_config: CacheConfig) -> None:
    with sealed(cache_config) as seal:
        object.__setattr__(cache_config, "cache_dtype", "fp8")
        with pytest.raises(ContractViolation):
            seal.enter(Phase.ALLOCATING)
        for _ in range(2):
            seal.enter(Phase.SHUTDOWN)
            cache_config.num_gpu_blocks = None


@pytest.mark.parametrize(
    ("phase", "name", "value"),
    [
        (Phase.PLANNING, "kv_cache_layout", "LBHNC"),
        (Phase.PLANNING, "block_size", 32),
        (Phase.PLANNING, "enable_prefix_caching", False),
        (Phase.ALLOCATING, "num_gpu_blocks", 999),
        (Phase.ALLOCATING, "cache_dtype", "fp8"),
    ],
)
def test_a_write_that_vllm_may_make_sets_what_the_contract_fixes_or_nothing(
    cache_config: CacheConfig, phase: Phase, name: str, value: object
) -> None:
    with sealed(cache_config, phase), pytest.raises(ContractViolation):
        setattr(cache_config, name, value)


def test_a_number_of_blocks_that_is_not_the_contracts_stops_the_allocation(cache_config: CacheConfig) -> None:
    with sealed(cache_config) as seal:
        cache_config.num_gpu_blocks = 999
        with pytest.raises(ContractViolation, match="the contract fixes 1000"):
            seal.enter(Phase.ALLOCATING)


def test_phases_go_forwards_only(cache_config: CacheConfig) -> None:
    with sealed(cache_config, Phase.SERVING) as seal, pytest.raises(ValueError, match="doesn't come after"):
        seal.enter(Phase.PLANNING)


def test_changes_that_no_guard_sees_are_found_on_the_next_check(cache_config: CacheConfig) -> None:
    with sealed(cache_config) as seal:
        seal.check()
        cache_config.kv_cache_dtype_skip_layers.append("0")
        with pytest.raises(ContractViolation, match="kv_cache_dtype_skip_layers"):
            seal.check()
        cache_config.kv_cache_dtype_skip_layers.clear()
        object.__setattr__(cache_config, "cache_dtype", "fp8")
        with pytest.raises(ContractViolation, match="past the seal"):
            seal.enter(Phase.ALLOCATING)


def test_only_what_the_contract_covers_is_sealed() -> None:
    model_config = ModelConfig()
    with Seal({"model_config": model_config}, fixed=FIXED, phase=Phase.SERVING):
        model_config.seed = 1
        with pytest.raises(ContractViolation, match=r"model_config\.max_model_len"):
            model_config.max_model_len = 4096


def test_a_whole_config_cannot_be_exchanged(cache_config: CacheConfig) -> None:
    @dataclass
    class VllmConfig:
        cache_config: CacheConfig
        model_config: ModelConfig
        attention_config: None = None
        scheduler_config: None = None
        parallel_config: None = None
        speculative_config: None = None

    vllm_config = VllmConfig(cache_config, ModelConfig())
    with (
        Seal(covered(vllm_config), fixed=FIXED),
        pytest.raises(ContractViolation, match=r"vllm_config\.cache_config"),
    ):
        vllm_config.cache_config = CacheConfig(cache_dtype="fp8")


def test_the_contract_says_what_is_fixed() -> None:
    contract = contract_of(qwen3_8b(), num_gpu_blocks=4000)
    fixed = fixed_values(contract, "target")
    assert fixed["cache_config.num_gpu_blocks"] == 4000
    assert fixed["cache_config.block_size"] == 16
    assert fixed["cache_config.kv_cache_layout"] == contract.target.layout
    assert "cache_config.enable_prefix_caching" not in fixed_values(contract, "draft")


# Recording


def test_recording_lets_everything_pass_and_says_who_wrote_what(cache_config: CacheConfig) -> None:
    with record_writes({"cache_config": cache_config}) as writes:
        NoisyDraftAttention(cache_config)
        cache_config.cache_dtype = "fp8_ds_mla"  # no change, no record
        cache_config.num_gpu_blocks = 5
    assert cache_config.cache_dtype == "fp8_ds_mla"
    first, second = writes
    assert first == ConfigWrite(
        field="cache_config.cache_dtype",
        old="auto",
        new="fp8_ds_mla",
        writer="NoisyDraftAttention",
        location=first.location,
    )
    assert (second.field, second.old, second.new) == ("cache_config.num_gpu_blocks", "None", "5")


def test_recording_ends_with_its_block_even_if_that_fails(cache_config: CacheConfig) -> None:
    with pytest.raises(RuntimeError), record_writes({"cache_config": cache_config}):
        raise RuntimeError
