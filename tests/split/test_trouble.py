"""Whatever becomes of the draft, every request ends with the target's own text; and no draft outlives its target."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.channel.process import ProcessIdentity
from cluster.engine.in_process import Completion, InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import Arm, await_draft, greedy, pair_settings, remote, separate_of
from tests.split.engines import endless_target
from tests.split.processes import Child

PAIR = "qwen3-dspark-agreeing"  # drafts are accepted, so a wrong one would show
REQUESTS = [greedy(range(40, 60), 30), greedy(range(7, 11), 24), greedy(range(100, 180), 30)]
DEADLINE_S = 3.0
STALL_LIMIT_S = 0.5
END_DEADLINE_S = 1.0

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return pair_settings(PAIR, tmp_path_factory.mktemp(PAIR))


@pytest.fixture(scope="module")
def colocated(settings: EngineSettings, start: Start) -> Arm:
    arm = Arm(start(InProcessEngine, settings))
    arm.run(REQUESTS)
    return arm


def start_separate(start: Start, settings: EngineSettings, **more: Any) -> Arm:
    return Arm(start(SeparateEngine, settings, **more))


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def run_with(arm: Arm, after_rounds: int, event: Callable[[], None]) -> tuple[list[tuple[int, ...]], float]:
    """Run the requests, with an event in mid-run; what they answered, and the longest step after it in seconds."""
    arm.forget()
    answers: list[list[int]] = [[] for _ in REQUESTS]
    longest, happened, last = 0.0, False, time.monotonic()
    for delta in arm.engine.stream(REQUESTS):
        now = time.monotonic()
        longest, last = max(longest, now - last) if happened else 0.0, now
        answers[delta.index].extend(delta.token_ids)
        if not happened and len(arm.rounds) >= after_rounds:
            event()
            happened = True
    assert happened
    return [tuple(answer) for answer in answers], longest


def accepted(completions: list[Completion]) -> int:
    return sum(sum(completion.accepted_by_round) for completion in completions)


def test_a_draft_that_is_killed(start: Start, settings: EngineSettings, colocated: Arm) -> None:
    """It costs its proposals while it is away; then another process has its place."""
    completions = colocated.run(REQUESTS)[0]
    expected = texts(completions)
    arm = start_separate(start, settings)
    arm.run(REQUESTS)
    process = separate_of(arm).draft_process
    answers, longest = run_with(arm, 6, lambda: process.send_signal(signal.SIGKILL))
    assert answers == expected
    assert remote(arm).lost
    assert longest < DEADLINE_S
    alone, rounds = arm.run(REQUESTS)
    assert texts(alone) == expected
    assert accepted(alone) == 0
    assert {row.num_sampled + row.num_rejected for one in rounds for row in one} <= {0, 1}, "nothing is verified"
    await_draft(arm)
    assert separate_of(arm).draft_process.pid != process.pid
    assert texts(arm.run(REQUESTS)[0]) == expected, "what runs while it takes its place"
    again = arm.run(REQUESTS)[0]
    assert texts(again) == expected
    assert accepted(again) >= 0.9 * accepted(completions)


def test_a_draft_that_is_silent(start: Start, settings: EngineSettings, colocated: Arm) -> None:
    """It costs the stall limit, in one round and no other; and it takes its own place again."""
    expected = texts(colocated.run(REQUESTS)[0])
    arm = start_separate(start, settings, stall_limit_s=STALL_LIMIT_S)
    process = separate_of(arm).draft_process
    for _ in range(2):
        arm.run(REQUESTS)  # the pace of every size is known
    answers, longest = run_with(arm, 6, lambda: process.send_signal(signal.SIGSTOP))
    assert answers == expected
    assert remote(arm).lost
    assert STALL_LIMIT_S <= longest < DEADLINE_S
    process.send_signal(signal.SIGCONT)
    await_draft(arm)
    assert separate_of(arm).draft_process.pid == process.pid
    assert texts(arm.run(REQUESTS)[0]) == expected
    assert accepted(arm.run(REQUESTS)[0]) > 0


def test_a_target_that_is_killed(settings: EngineSettings) -> None:
    """Its draft ends by itself, and nothing is left of what they shared."""
    target = Child(endless_target, settings, REQUESTS)
    pids = target.message()
    draft = ProcessIdentity.of(pids["draft"])
    target.kill()
    deadline = time.monotonic() + END_DEADLINE_S
    while draft.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    left = [path.name for path in Path("/dev/shm").glob("dspark-cluster.*")]
    assert not [name for name in left for pid in pids.values() if f".{pid}." in name]
