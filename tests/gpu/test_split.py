"""A DSpark draft in another process, on its target's GPU and on another one, drafts as in the target's; and the target
goes on when it is killed, and when it hangs. Needs vLLM's CUDA build and a GPU; takes two where there are two."""

import signal
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from cluster.engine.settings import EngineSettings
from cluster.speculation.settings import DEFAULT_STALL_LIMIT_S
from tests.gpu.engines import REQUESTS, Separate, apart, run_arm, settings_of
from tests.split.arms import speculator_of

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PAIR = "qwen3-dspark-agreeing"
RUN = 2
RUNNING = REQUESTS[RUN]
LONGEST_WAIT_S = 0.2
ON_THE_OTHER_GPU = {"CUDA_VISIBLE_DEVICES": "1,0"}  # both sides see both
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
on_each_way = pytest.mark.parametrize(
    "separate",
    [
        pytest.param(Separate(channel="cuda_ipc"), id="cuda_ipc on one GPU"),
        pytest.param(Separate(channel="cuda_ipc", draft_environment=ON_THE_OTHER_GPU), id="cuda_ipc", marks=needs_two),
        pytest.param(Separate(channel="nccl", draft_environment=ON_THE_OTHER_GPU), id="nccl", marks=needs_two),
    ],
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return settings_of(PAIR, tmp_path_factory.mktemp(PAIR), compilation_mode=0)  # which takes most of a start


@pytest.fixture(scope="module")
def colocated(settings: EngineSettings) -> Any:
    return apart(run_arm, settings, None)[0]


@on_each_way
def test_drafts_are_those_of_a_draft_in_the_targets_process(
    settings: EngineSettings, colocated: Any, separate: Separate
) -> None:
    runs, lost = apart(run_arm, settings, separate)
    assert lost is None
    assert runs == colocated


def run_and_kill(settings: EngineSettings, separate: Separate, connection: Connection) -> None:
    """Sends each request's tokens, the waits for a next one from the kill on, as (when it ended, how long it was), in
    seconds, and why the draft is lost."""
    with separate.start(settings) as engine:
        engine.generate(REQUESTS[0])  # with so many requests that some steps draft nothing: what those need compiles
        tokens: list[list[int]] = [[] for _ in RUNNING]
        times: list[float] = []
        for delta in engine.stream(RUNNING):
            tokens[delta.index] += delta.token_ids
            if times:
                times.append(time.monotonic())
            elif len(tokens[1]) > 10:
                engine.draft_process.kill()
                times.append(time.monotonic())
        waits = [(after - times[0], after - before) for before, after in pairwise(times)]
        connection.send((tokens, waits, speculator_of(engine).lost))


@on_each_way
def test_a_target_goes_on_within_200_ms_of_its_drafts_death(
    settings: EngineSettings, colocated: Any, separate: Separate
) -> None:
    tokens, waits, lost = apart(run_and_kill, settings, separate)
    assert lost
    assert [wait for wait in waits if wait[1] >= LONGEST_WAIT_S] == []
    assert tokens == [list(completion.token_ids) for completion in colocated[RUN][0]]


def run_and_stop(settings: EngineSettings, separate: Separate, connection: Connection) -> None:
    """Sends each request's tokens, the waits for a next one before the stop and from it on, in seconds, and why the
    draft is lost."""
    with separate.start(settings) as engine:
        engine.generate(REQUESTS[0])
        for _ in range(3):
            engine.generate(RUNNING)  # then the pace of every size is known
        tokens: list[list[int]] = [[] for _ in RUNNING]
        before, after = [time.monotonic()], list[float]()
        for delta in engine.stream(RUNNING):
            tokens[delta.index] += delta.token_ids
            (after or before).append(time.monotonic())
            if not after and len(tokens[1]) > 30:
                engine.draft_process.send_signal(signal.SIGSTOP)
                after.append(time.monotonic())
        lost = speculator_of(engine).lost
        engine.draft_process.kill()
        waits = [[later - earlier for earlier, later in pairwise(times)] for times in (before, after)]
        connection.send((tokens, *waits, lost))


@on_each_way
def test_a_target_goes_on_within_200_ms_of_a_step_whose_draft_hangs(
    settings: EngineSettings, colocated: Any, separate: Separate
) -> None:
    paced = replace(separate, stall_limit_s=DEFAULT_STALL_LIMIT_S)
    tokens, before, after, lost = apart(run_and_stop, settings, paced)
    assert lost is not None
    assert "no reply to round" in lost
    assert max(after) >= DEFAULT_STALL_LIMIT_S, "it waited for the draft"
    assert max(after) < statistics.median(before) + LONGEST_WAIT_S
    assert tokens == [list(completion.token_ids) for completion in colocated[RUN][0]]


def run_slowly(settings: EngineSettings, separate: Separate, connection: Connection) -> None:
    """Sends each request's tokens, what the rounds took, and why the draft is lost, if it is."""
    with separate.start(settings) as engine:
        completions = engine.generate(RUNNING)
        speculator = speculator_of(engine)
        times = speculator.times
        connection.send(([list(each.token_ids) for each in completions], times.rounds, times.wait, speculator.lost))


@on_each_way
def test_a_draft_that_is_slow_and_steady_is_kept(settings: EngineSettings, colocated: Any, separate: Separate) -> None:
    slow = replace(separate, stall_limit_s=DEFAULT_STALL_LIMIT_S, draft_module="tests.gpu.slow_draft")
    tokens, rounds, wait_s, lost = apart(run_slowly, settings, slow)
    assert lost is None
    assert rounds > 10
    assert wait_s > DEFAULT_STALL_LIMIT_S * (rounds - 2), "each is slower than a draft may hang"
    assert tokens == [list(completion.token_ids) for completion in colocated[RUN][0]]
