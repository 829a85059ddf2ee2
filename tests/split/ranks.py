"""What the processes of the tests with two tensor-parallel ranks run: vLLM has one set of ranks in a process."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cluster.channel.process import ProcessIdentity, ProcessWatch
from cluster.channel.segment import segments_of
from cluster.engine.in_process import Completion, GenerationRequest, InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from tests.split.arms import Arm, Round, await_draft, remote, separate_of
from tests.split.engines import Report

EVENT_AFTER_DELTAS = 8
DEADLINE_S = 60


def colocated_ranks(settings: EngineSettings, requests: list[GenerationRequest], report: Report) -> None:
    """Each rank has its part of target and draft: completions and rounds, and how the other rank's process has ended
    when the engine was closed."""
    with InProcessEngine(settings) as engine:
        run = _plain(*Arm(engine).run(requests))
        process = _other_rank(engine)
    report({"run": run, "ended": process.exitcode})


def ranks_beside_a_draft(settings: EngineSettings, requests: list[GenerationRequest], report: Report) -> None:
    """The same with the draft elsewhere, and then: the tokens when it is killed, when it has come back, and why the
    engine ends when a rank is killed, after how long, and what shared memory it leaves."""
    arm = Arm(SeparateEngine(settings))
    report_of = {"run": _plain(*arm.run(requests)), "lost_at_first": remote(arm).lost}
    draft, rank = separate_of(arm).draft_process, rank_process(arm.engine)
    watch = ProcessWatch(ProcessIdentity.of(rank))
    report_of["killed"] = tokens_with(arm, requests, lambda: draft.send_signal(signal.SIGKILL))
    report_of["lost_then"] = remote(arm).lost
    await_draft(arm)
    arm.run(requests)  # prefilled again, in the new draft's presence
    report_of["again"] = _plain(*arm.run(requests))
    killed_s = 0.0

    def kill_rank() -> None:
        """Between two steps: in one, the first rank would wait for it in vLLM's shared memory without end."""
        nonlocal killed_s
        os.kill(rank, signal.SIGKILL)
        killed_s = time.monotonic()
        assert watch.has_ended(within_s=DEADLINE_S)

    try:
        tokens_with(arm, requests, kill_rank)
    except UserError as error:
        report_of |= {"error": str(error), "said_after_s": time.monotonic() - killed_s}
    arm.engine.close()
    report(report_of | {"left": [str(path) for path in segments_of([ProcessIdentity.current()])]})


def rank_process(engine: InProcessEngine) -> int:
    """The id of the second rank's process."""
    pid: int = _other_rank(engine).pid
    return pid


def _other_rank(engine: InProcessEngine) -> Any:
    return engine.vllm_engine.model_executor.others[0].process


def tokens_with(arm: Arm, requests: list[GenerationRequest], event: Callable[[], None]) -> list[list[int]]:
    """What each request is answered, with an event in mid-run."""
    answers: list[list[int]] = [[] for _ in requests]
    for number, delta in enumerate(arm.engine.stream(requests)):
        answers[delta.index] += delta.token_ids
        if number == EVENT_AFTER_DELTAS:
            event()
    return answers


def _plain(completions: list[Completion], rounds: list[Round]) -> dict[str, Any]:
    return {
        "tokens": [list(completion.token_ids) for completion in completions],
        "accepted": [list(completion.accepted_by_round) for completion in completions],
        "rounds": [[asdict(row) for row in each] for each in rounds],
    }
