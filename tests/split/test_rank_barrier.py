"""The contract's barriers between two processes that vLLM takes for the tensor-parallel ranks of one engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.facts import SideFacts
from tests.control import CONTRACT
from tests.split.engines import Report
from tests.split.processes import Child
from tests.unit.test_contract_pairs import backend, group, side

FACTS = side("target", group("all", "target", backend("FLASH_ATTN")), tensor_parallel_size=2)
REASON = "this rank has planned another number of blocks"


class RecordingMember:
    """In the place of the coordinator's member: what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def agree(self, facts: SideFacts) -> KVContract:
        self.asked.append(f"agree on {facts.kv_cache_bytes} bytes")
        return CONTRACT

    def accept(self, contract: KVContract) -> None:
        self.asked.append(f"accept {contract.digest}")

    def ready(self, contract: KVContract) -> None:
        self.asked.append(f"ready {contract.digest}")

    @contextmanager
    def reporting(self) -> Iterator[None]:
        try:
            yield
        except ContractViolation as violation:
            self.asked.append(f"tell: {violation.reason}")
            raise


def pass_barriers(rank: int, rendezvous: str, faulty: bool, report: Report) -> None:
    """The phases of a worker. Reports what the member was asked, and how far this rank came."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    from cluster.engine.rank_barrier import FirstRank, FurtherRank

    os.environ["VLLM_DIST_IDENT"] = Path(rendezvous).name  # as a worker does, for CPUs with AVX-512
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, rendezvous, rank, "gloo")
        initialize_model_parallel(2)
    member = RecordingMember()
    barrier: Any = FirstRank(member) if rank == 0 else FurtherRank()  # type: ignore[arg-type]
    came: list[str] = []
    try:
        with barrier.reporting():
            _, contract = barrier.agree(replace(FACTS, kv_cache_bytes=1000 - rank))
            came.append(contract.digest)
        with barrier.reporting():
            if faulty and rank == 1:
                raise ContractViolation("num_blocks", old=8, new=9, reason=REASON)
            barrier.accept(contract)
            came.append("allocates")
        with barrier.reporting():
            barrier.ready(contract)
            came.append("serves")
    except ContractViolation as violation:
        came.append(violation.reason)
    report({"asked": member.asked, "came": came})


@pytest.mark.parametrize("faulty", [False, True], ids=["all are right", "the second is not"])
def test_a_rank_allocates_when_all_have_said_so(tmp_path: Path, faulty: bool) -> None:
    name = f"dspark-test-{uuid4().hex}"
    rendezvous = f"file://{tmp_path / name}"
    ranks = [Child(pass_barriers, rank, rendezvous, faulty) for rank in range(2)]
    first, second = (rank.report() for rank in ranks)
    for left in Path("/dev/shm").glob(f"{name}*"):  # vLLM's, which it unlinks at a regular end only
        left.unlink()
    agreed = [CONTRACT.digest]
    if faulty:
        assert first == {"asked": ["agree on 999 bytes", f"tell: {REASON}"], "came": [*agreed, REASON]}
        assert second["came"] == [*agreed, REASON]
    else:
        asked = [f"accept {CONTRACT.digest}", f"ready {CONTRACT.digest}"]
        assert first["asked"] == ["agree on 999 bytes", *asked]
        assert first["came"] == second["came"] == [*agreed, "allocates", "serves"]
