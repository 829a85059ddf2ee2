"""What of several tensor-parallel ranks needs no engine: their facts, and the arguments of a pair's two engines."""

import logging
import os
import re
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from cluster.contract.errors import ContractViolation
from cluster.contract.policy import Policy
from cluster.contract.ranks import facts_of_all
from cluster.control.settings import MemberSettings
from cluster.engine.pair import draft_engine_args, target_engine_args
from cluster.engine.settings import EXECUTOR, EngineSettings
from cluster.engine.stuck import end_if_stuck
from cluster.errors import UserError
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.speculation.settings import RemoteDraftSettings
from tests.checkpoints import make_pair
from tests.unit.test_contract_pairs import backend, group, side

REMOTE = RemoteDraftSettings(
    member=MemberSettings(address="unix:nowhere", role="target", name="target", start_timeout_s=1.0)
)
DEADLINE_S = 60
FACTS = side("target", group("all", "target", backend("FLASH_ATTN")), tensor_parallel_size=2)


def settings_of(pair_name: str, folder: Path, tensor_parallel_size: int) -> EngineSettings:
    pair = make_pair(pair_name, folder)
    target, draft = open_model(str(pair.target), role="target"), open_model(str(pair.draft), role="draft")
    speculation = plan_speculation(target, draft, None)
    return EngineSettings(target=target, speculation=speculation, tensor_parallel_size=tensor_parallel_size)


def test_ranks_have_the_blocks_of_the_one_with_least_memory() -> None:
    other = replace(FACTS, kv_cache_bytes=FACTS.kv_cache_bytes - 1, weight_bytes=FACTS.weight_bytes + 1)
    assert facts_of_all([FACTS, other]) == other
    assert facts_of_all([FACTS]) == FACTS


def test_a_rank_that_would_allocate_something_else_is_named() -> None:
    other = replace(FACTS, groups=(group("all", "target", backend("TRITON_ATTN")),))
    with pytest.raises(ContractViolation, match="tensor-parallel rank 2 differs from 0") as violation:
        facts_of_all([FACTS, FACTS, other])
    assert violation.value.field == "groups"


def test_the_target_has_its_ranks_and_the_draft_one(tmp_path: Path) -> None:
    settings = settings_of("qwen3-dspark", tmp_path, 2)
    arguments = settings.to_engine_args() | target_engine_args(settings, REMOTE)
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (2, EXECUTOR)
    of_one = replace(settings, tensor_parallel_size=1)
    assert draft_engine_args(settings, Policy()) == draft_engine_args(of_one, Policy())
    assert not of_one.to_engine_args().keys() & {"tensor_parallel_size", "distributed_executor_backend"}


def test_a_draft_that_reads_its_targets_kv_is_refused(tmp_path: Path) -> None:
    settings = settings_of("gemma4-mtp", tmp_path, 2)
    refusal = f"tensor_parallel_size 2 with draft {settings.speculation.draft.name}: it reads its target's KV"  # type: ignore[union-attr]
    with pytest.raises(UserError, match=re.escape(refusal)):
        target_engine_args(settings, REMOTE)
    of_one = replace(settings, tensor_parallel_size=1)
    assert target_engine_args(of_one, REMOTE)["worker_cls"]


def wait_for_what_ends_and_what_does_not() -> None:
    end_if_stuck(lambda: None, DEADLINE_S)
    end_if_stuck(fail, DEADLINE_S)
    end_if_stuck(lambda: time.sleep(DEADLINE_S), 0.1)


def fail() -> None:
    raise RuntimeError("the device has failed")


def test_a_process_that_waits_for_ever_ends() -> None:
    process = get_context("spawn").Process(target=wait_for_what_ends_and_what_does_not)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 1


class EndedRank:
    """The executor's end of a rank whose process has ended, as the executor itself doesn't know yet."""

    def __init__(self, why: Exception) -> None:
        self.process = self
        self._why = why
        self.sentinel, other = os.pipe()
        os.close(other)  # so it can be read, as an ended process's

    def send(self, _: object) -> None:
        raise BrokenPipeError("Broken pipe")

    def lost(self) -> Exception:
        return self._why


def test_a_rank_s_end_that_a_call_finds_is_told_to_whoever_uses_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The core of an engine keeps the error of a call for its metrics to that call; and a death is told once."""
    from cluster.engine.tensor_parallel import RankLost, TensorParallelExecutor

    lost = RankLost("tensor-parallel rank 1", "its process has ended with exit code -9", "start again")
    executor: Any = TensorParallelExecutor.__new__(TensorParallelExecutor)
    executor._lost, executor._losing, executor._closed, executor._busy_since_s = None, threading.Lock(), False, None
    executor.others, ended, told = [EndedRank(lost)], [], []
    executor._end_others = lambda: ended.append(True)
    executor._on_failure = None
    executor.register_failure_callback(lambda: told.append("failed"))
    with caplog.at_level(logging.ERROR), pytest.raises(RankLost, match="rank 1: its process has ended"):
        executor.collective_rpc("round_report")
    assert (told, ended) == (["failed"], [True])
    assert "tensor-parallel rank 1: its process has ended with exit code -9" in caplog.text
    with pytest.raises(RankLost, match="rank 1"):
        executor.check_health()
    watching = threading.Thread(target=executor.follow_loss, args=(lost,))
    watching.start()
    executor._closed = True
    watching.join(DEADLINE_S)
    executor.register_failure_callback(lambda: told.append("had failed"))
    assert told == ["failed", "had failed"]
    os.close(executor.others[0].sentinel)
