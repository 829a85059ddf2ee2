"""Whatever becomes of the draft, every request ends with the target's own text."""

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from cluster.engine.in_process import Completion, InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import Arm, greedy, pair_settings, remote, separate_of

PAIR = "qwen3-dspark-agreeing"  # drafts are accepted, so a wrong one would show
REQUESTS = [greedy(range(40, 73), 40), greedy(range(7, 11), 30), greedy(range(100, 300), 36)]
DEADLINE_S = 3.0

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return pair_settings(PAIR, tmp_path_factory.mktemp(PAIR), num_gpu_blocks=16)


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


def test_a_draft_that_is_killed(start: Start, settings: EngineSettings, colocated: Arm) -> None:
    expected = texts(colocated.run(REQUESTS)[0])
    arm = start_separate(start, settings)
    process = separate_of(arm).draft_process
    answers, longest = run_with(arm, 6, lambda: process.send_signal(signal.SIGKILL))
    assert answers == expected
    assert remote(arm).lost
    assert all(len(set(row.drafts)) == 1 for row in arm.rounds[-1])  # no proposal
    assert longest < DEADLINE_S
    assert texts(arm.run(REQUESTS)[0]) == expected  # and so it goes on


def test_a_draft_that_is_silent(start: Start, settings: EngineSettings, colocated: Arm) -> None:
    """One round waits for as long as the deadline says, and no other."""
    expected = texts(colocated.run(REQUESTS)[0])
    arm = start_separate(start, settings, round_deadline_s=DEADLINE_S)
    process = separate_of(arm).draft_process
    arm.run(REQUESTS)  # the draft is warm: what it misses the deadline by is the signal
    answers, longest = run_with(arm, 6, lambda: process.send_signal(signal.SIGSTOP))
    assert answers == expected
    assert remote(arm).lost
    assert DEADLINE_S <= longest < 2 * DEADLINE_S
    process.send_signal(signal.SIGCONT)
    process.wait(30)  # its target has let go of it


def test_a_draft_that_forgets_its_context(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compare draft ids, of random weights: acceptance need not show it."""
    settings = pair_settings("qwen3-dspark", tmp_path_factory.mktemp("qwen3-dspark"), num_gpu_blocks=16)
    completions, rounds = Arm(start(InProcessEngine, settings)).run(REQUESTS)
    arm = start_separate(start, settings, draft_module="tests.split.wiped_draft")
    process = separate_of(arm).draft_process
    answers, _ = run_with(arm, 8, lambda: process.send_signal(signal.SIGUSR1))
    assert answers == texts(completions)
    assert remote(arm).lost is None
    assert arm.rounds[:8] == rounds[:8]
    assert arm.rounds != rounds


def test_a_draft_whose_engine_closes_ends_by_itself(start: Start, settings: EngineSettings) -> None:
    arm = start_separate(start, settings)
    separate_of(arm).stop_draft()
    assert separate_of(arm).draft_process.returncode == 0
    assert remote(arm).lost is None
