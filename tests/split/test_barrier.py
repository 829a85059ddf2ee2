"""Two real vLLM engines, each in a process of its own, agree on a KV contract before either allocates."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.codec import to_plain
from cluster.contract.contract import KVContract
from cluster.contract.policy import Policy
from cluster.contract.verify import verify_allocation
from cluster.control.child_process import ChildProcess
from cluster.control.settings import CoordinatorSettings, MemberSettings
from cluster.engine.pair import TARGET_WORKER
from cluster.engine.separate import COORDINATOR_MODULE
from cluster.speculation.settings import RemoteDraftSettings
from tests.checkpoints import TinyPair, make_pair
from tests.split.arms import pair_settings
from tests.split.engines import contracted_draft, contracted_target, separate_pair, tensors_of
from tests.split.processes import Child

Reports = tuple[dict[str, Any], dict[str, Any]]
Meet = Callable[..., Reports]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(getattr(request, "param", "qwen3-dspark"), tmp_path_factory.mktemp("pair"))


@pytest.fixture
def meet(pair: TinyPair, tmp_path: Path) -> Meet:
    """Start both sides, let them negotiate, and wait for what became of target and draft."""

    def run(*, target: dict[str, Any], draft: dict[str, Any], mutation: bool = False) -> Reports:
        address = f"unix:{tmp_path / 'coordinator'}"
        settings = CoordinatorSettings(address=address, policy=Policy())
        coordinator = ChildProcess("coordinator", COORDINATOR_MODULE, to_plain(settings))
        coordinator.await_start()
        common = {
            "model": str(pair.target),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "speculative_config": {
                "model": str(pair.draft),
                "method": pair.method,
                "num_speculative_tokens": pair.num_speculative_tokens,
            },
        }
        remote = RemoteDraftSettings(member=MemberSettings(address=address, role="target", name="target"))
        worker = {"worker_cls": TARGET_WORKER, "additional_config": remote.to_additional_config()}
        member = asdict(MemberSettings(address=address, role="draft", name="draft"))
        sides = (
            Child(contracted_target, common | worker | target),
            Child(contracted_draft, member, common | draft, mutation),
        )
        reports = (sides[0].report(), sides[1].report())
        coordinator.stop(5.0)
        return reports

    return run


def test_both_engines_allocate_just_what_they_agreed_on(meet: Meet) -> None:
    """The draft's would have smaller blocks and many more of them, if it were alone."""
    target, draft = meet(target={"num_gpu_blocks_override": 40}, draft={"block_size": 64})
    contract = KVContract.from_json(target["contract"])
    assert KVContract.from_json(draft["contract"]) == contract
    assert {group.block_size for group in contract.groups} == {128}
    assert target["allocations"] == draft["allocations"] == [contract.num_blocks] == [40]
    verify_allocation(contract, "target", tensors_of(target))
    verify_allocation(contract, "draft", tensors_of(draft))


def test_after_a_refusal_neither_engine_has_allocated(meet: Meet) -> None:
    for report in meet(target={"num_gpu_blocks_override": 32}, draft={"num_gpu_blocks_override": 24}):
        assert (report["type"], report["field"]) == ("ContractError", "num_gpu_blocks_override")
        assert "32 on the target and 24 on the draft" in report["error"]
        assert report["allocations"] == []


def test_a_constructor_that_rewrites_the_cache_dtype_is_named_before_allocation(meet: Meet) -> None:
    blocks = {"num_gpu_blocks_override": 32}
    target, draft = meet(target=blocks, draft=blocks, mutation=True)
    assert (draft["type"], draft["field"]) == ("ContractViolation", "cache_config.cache_dtype")
    assert "RewritingAttention" in draft["error"]
    assert "wrote fp8" in draft["error"]
    assert draft["allocations"] == []
    # The target learns of it at the barrier, and stops there.
    assert (target["type"], target["field"]) == ("ContractError", "cache_config.cache_dtype")
    assert "RewritingAttention" in target["error"]
    assert target["allocations"] == []


@pytest.mark.parametrize("pair", ["gemma4-mtp"], indirect=True)
@pytest.mark.parametrize(
    ("config", "arguments", "field"),
    [
        ({"num_global_key_value_heads": 2}, {}, "row_bytes"),
        ({}, {"kv_cache_dtype": "bfloat16"}, "cache_config.cache_dtype"),
    ],
    ids=["layout", "dtype"],
)
def test_a_draft_that_would_misread_the_targets_kv_is_refused_before_allocation(
    meet: Meet, pair: TinyPair, config: dict[str, Any], arguments: dict[str, Any], field: str
) -> None:
    file = pair.draft / "config.json"
    right = file.read_text()
    document = json.loads(right)
    document["text_config"] |= config
    file.write_text(json.dumps(document))
    try:
        reports = meet(target={}, draft=arguments)
    finally:
        file.write_text(right)
    for report in reports:
        assert (report["field"], report["allocations"]) == (field, [])


def test_a_policy_that_the_draft_cant_follow_ends_both_processes_with_one_sentence(tmp_path: Path) -> None:
    policy = Policy(attention_backend="FLASHMLA")
    report = Child(separate_pair, pair_settings("qwen3-dspark", tmp_path), policy).report()
    assert "FLASHMLA" in report["error"]
    assert report["left"] == []
