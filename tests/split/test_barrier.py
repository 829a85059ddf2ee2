"""Two real vLLM engines, each in a process of its own, agree on a KV contract before either allocates.

The target, and a standalone draft as an engine of its own. Both run V2 on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.contract import KVContract
from cluster.contract.policy import Policy
from cluster.contract.verify import verify_allocation
from tests.checkpoints import TinyPair, make_pair
from tests.checkpoints.shapes import HIDDEN
from tests.split.engines import contracted_engine, tensors_of
from tests.split.negotiator import Coordinator
from tests.split.processes import Child


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    contract: KVContract | None
    target: dict[str, Any]
    draft: dict[str, Any]


Meet = Callable[..., Outcome]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair("qwen3-draft-model", tmp_path_factory.mktemp("pair"))


@pytest.fixture
def meet(pair: TinyPair, tmp_path: Path) -> Meet:
    """Start both sides' engines, let them negotiate, and wait for what became of them."""

    def run(policy: Policy, *, target: dict[str, Any], draft: dict[str, Any], mutation: bool = False) -> Outcome:
        coordinator = Coordinator(tmp_path, policy)

        def arguments(role: str, model: Path, more: dict[str, Any]) -> dict[str, Any]:
            contract = {
                "role": role,
                "negotiator": "tests.split.negotiator.SocketNegotiator",
                "address": coordinator.address,
                "method": pair.method,
                "num_speculative_tokens": pair.num_speculative_tokens,
                "target_hidden_size": HIDDEN,
            }
            return {
                "model": str(model),
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "worker_cls": "cluster.engine.contract_worker.ContractWorker",
                "additional_config": {"contract": contract},
            } | more

        sides = (
            Child(contracted_engine, arguments("target", pair.target, target), False),
            Child(contracted_engine, arguments("draft", pair.draft, draft), mutation),
        )
        reports = [side.report() for side in sides]
        coordinator.join()
        return Outcome(contract=coordinator.contract, target=reports[0], draft=reports[1])

    return run


def test_both_engines_allocate_just_what_they_agreed_on(meet: Meet) -> None:
    """The draft's would have smaller blocks and many more of them, if it were alone."""
    outcome = meet(Policy(), target={"num_gpu_blocks_override": 40}, draft={"block_size": 64})
    contract = outcome.contract
    assert contract is not None
    assert outcome.target["digest"] == outcome.draft["digest"] == contract.digest
    assert {group.block_size for group in contract.groups} == {128}
    assert contract.num_blocks == 40
    assert outcome.target["allocations"] == outcome.draft["allocations"] == [contract.num_blocks]
    verify_allocation(contract, "target", tensors_of(outcome.target))
    verify_allocation(contract, "draft", tensors_of(outcome.draft))


def test_after_a_refusal_neither_engine_has_allocated(meet: Meet) -> None:
    outcome = meet(Policy(), target={"num_gpu_blocks_override": 32}, draft={"num_gpu_blocks_override": 24})
    assert outcome.contract is None
    for report in (outcome.target, outcome.draft):
        assert (report["type"], report["field"]) == ("ContractError", "num_gpu_blocks_override")
        assert "32 on the target and 24 on the draft" in report["error"]
        assert report["allocations"] == []


def test_a_constructor_that_rewrites_the_cache_dtype_is_named_before_allocation(meet: Meet) -> None:
    outcome = meet(
        Policy(),
        target={"num_gpu_blocks_override": 32},
        draft={"num_gpu_blocks_override": 32},
        mutation=True,
    )
    assert (outcome.draft["type"], outcome.draft["field"]) == ("ContractViolation", "cache_config.cache_dtype")
    assert "RewritingAttention" in outcome.draft["error"]
    assert "wrote fp8" in outcome.draft["error"]
    assert outcome.draft["allocations"] == []
    # The target learns of it at the barrier, and stops there.
    assert outcome.target["type"] == "ContractError"
    assert "RewritingAttention" in outcome.target["error"]
    assert outcome.target["allocations"] == []
    assert outcome.contract is not None
    writes = outcome.contract.draft.constructor_writes
    assert {(write.field, write.old, write.new) for write in writes} == {("cache_config.cache_dtype", "auto", "fp8")}
    assert all("RewritingAttention" in write.writer for write in writes)
