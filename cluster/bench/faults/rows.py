"""The rows of the table: each makes one fault happen under load, and compares what came of it with its bar."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from cluster.bench.faults.figures import Figure, Row, ms, span
from cluster.bench.faults.held import Held
from cluster.bench.faults.load import Outcome, Tokens, run_by_turns, run_load, some_requests
from cluster.bench.faults.waiting import wait_until
from cluster.channel.faults import Action, FaultsConfig, Message, MessageFault
from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.separate import SeparateEngine

STALL_BAR_S: Final = 0.2
PLAIN_SPEED_BAR: Final = 0.95
GROWTH_BAR: Final = 0.01

REJOIN_TIMEOUT_S: Final = 240.0
"""For a draft's process to start again, import vLLM and load, on a machine that does other things."""

_SHORT_CUT_S: Final = 0.5

_BAD: Final[tuple[Action, ...]] = ("corrupt", "truncate", "duplicate", "reorder")

_CANCELLED_TOGETHER: Final = 8


@dataclass(slots=True, kw_only=True)
class Bench:
    """A pair whose channel can have faults, the same target without a draft, and what that answers."""

    pair: SeparateEngine
    plain: InProcessEngine
    requests: Sequence[GenerationRequest]
    alone: Outcome
    """The load on the target that has no draft."""
    calm: Outcome
    """The load without a fault."""
    vocab_size: int

    @classmethod
    def begin(cls, pair: SeparateEngine, plain: InProcessEngine, count: int) -> "Bench":
        """Warms both engines up. `count` requests make a load."""
        vocab_size = pair.vllm_engine.vllm_config.model_config.get_vocab_size()
        requests = some_requests(count, vocab_size=vocab_size)
        run_load(pair, requests)
        return cls(
            pair=pair,
            plain=plain,
            requests=requests,
            alone=run_load(plain, requests),
            calm=run_load(pair, requests),
            vocab_size=vocab_size,
        )

    @property
    def expected(self) -> Sequence[Tokens]:
        return self.alone.answers

    def killed(self, times: int) -> Row:
        """The draft's process, by SIGKILL. The next one starts on the target's own cores, which slows it down."""

        def kill() -> None:
            self.pair.draft_process.send_signal(signal.SIGKILL)

        outcomes = [self._load_with(kill) for _ in range(times)]
        row = self._lost("draft killed", outcomes)
        usual = statistics.median(outcome.usual_gap_without_draft for outcome, _ in outcomes)
        value = f"{ms(usual)}, {ms(self.alone.usual_gap_without_draft)} of plain while nothing starts"
        figure = Figure(name="a step while it starts on the same cores", value=value)
        return replace(row, figures=(*row.figures, figure))

    def stopped(self) -> Row:
        """The draft's process, by SIGSTOP, for a third of a load; then it goes on."""
        process = self.pair.draft_process
        third = len(self.requests) // 3
        continued: list[float] = []

        def go_on() -> None:
            process.send_signal(signal.SIGCONT)
            continued.append(time.monotonic())

        events = {third: lambda: process.send_signal(signal.SIGSTOP), 2 * third: go_on}
        outcome = run_load(self.pair, self.requests, events)
        return self._lost("draft stopped and continued", [(outcome, self._await_draft() - continued[0])])

    def cut(self, seconds: float) -> Row:
        """The network between the two."""
        fault = MessageFault(message="request", action="cut", seconds=seconds)
        outcome = self._load_with(lambda: self._begin_faults(FaultsConfig(messages=(fault,))))
        return self._lost(f"network cut for {seconds:g} s", [outcome])

    def coordinator_killed(self) -> Row:
        """And a short cut right after, so that both sides need the one that is started in its place."""
        epoch = self.pair.speculator.report.epoch
        fault = MessageFault(message="request", action="cut", seconds=_SHORT_CUT_S)

        def kill() -> None:
            self.pair.coordinator_process.send_signal(signal.SIGKILL)
            self._begin_faults(FaultsConfig(messages=(fault,)))

        row = self._lost("coordinator killed, then the draft lost", [self._load_with(kill)])
        went_on = self.pair.speculator.report.epoch > epoch
        return replace(row, figures=(*row.figures, Figure.holds("epochs go on", went_on)))

    def away(self) -> Row:
        """How fast the target is without its draft, which stands still: step by step beside the same target that never
        had one. They make the same steps."""
        begun = time.monotonic()
        process = self.pair.draft_process
        process.send_signal(signal.SIGSTOP)
        run_load(self.pair, self.requests[:2])  # the draft is lost here
        lost_s = time.monotonic()
        steps = run_by_turns(self.plain, self.pair, self.requests)
        was_away = self.pair.speculator.draft_epoch == 0
        process.send_signal(signal.SIGCONT)
        speed = sum(plain_s for plain_s, _ in steps) / sum(away_s for _, away_s in steps)
        median = statistics.median(plain_s / away_s for plain_s, away_s in steps)
        self._await_draft()
        return Row(
            fault="draft away",
            requests=len(self.requests),
            figures=(
                Figure.holds("away all the time", was_away),
                Figure(name="speed of plain", value=f"{speed:.0%}", is_met=speed >= PLAIN_SPEED_BAR),
                Figure(name="in the median step", value=f"{median:.0%}"),
                Figure(name="lost after", value=span([lost_s - begun])),
            ),
            seconds=time.monotonic() - begun,
        )

    def bad_messages(self, every: int) -> Row:
        """One in `every` request and reply is corrupt, truncated, repeated or out of order, by turns."""
        begun = time.monotonic()
        faults = [
            MessageFault(message=message, action=action, nth=1 + every * turn, every=every * len(_BAD))
            for message in get_args(Message)
            for turn, action in enumerate(_BAD)
        ]
        losses = self.pair.speculator.report.losses
        self._begin_faults(FaultsConfig(messages=tuple(faults)))
        outcome = run_load(self.pair, self.requests)
        self._begin_faults(FaultsConfig())
        failed = outcome.failed(self.expected)
        lost = self.pair.speculator.report.losses - losses
        self._await_draft()
        return Row(
            fault=f"1 in {every} messages corrupt, truncated, repeated, out of order",
            requests=len(self.requests),
            figures=(
                Figure.none("failed or not exact", failed),
                Figure(name="pairs begun again", value=str(lost)),
            ),
            seconds=time.monotonic() - begun,
        )

    def cancels(self, count: int) -> Row:
        """Requests that are given up. The draft keeps nothing of a request but what lies under the target's block ids:
        the target's blocks are those of both."""
        begun = time.monotonic()
        core: Any = self.pair.vllm_engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_manager.block_pool
        free = blocks.get_num_free_blocks()
        self._give_up(count)
        leaked = free - blocks.get_num_free_blocks()
        return Row(
            fault=f"{count:,} cancels",
            requests=count,
            figures=(Figure.none("leaked blocks", leaked),),
            seconds=time.monotonic() - begun,
        )

    def soak(self, seconds: float) -> Row:
        """Mixed load: memory, descriptors and segments, from the middle of it, when all is warm, to its end."""
        begun = time.monotonic()
        middle: Held | None = None
        loads = 0
        while time.monotonic() - begun < seconds or middle is None:
            requests = some_requests(len(self.requests), vocab_size=self.vocab_size, seed=1 + loads % 4)
            run_load(self.pair, requests)
            self._give_up(_CANCELLED_TOGETHER)
            loads += 1
            if middle is None and time.monotonic() - begun >= seconds / 2:
                middle = self._held()
        growth = self._held().growth_since(middle)
        return Row(
            fault=f"{seconds:g} s of mixed load",
            requests=loads * (len(self.requests) + _CANCELLED_TOGETHER),
            figures=tuple(
                Figure(name=f"growth of {name}", value=f"{share:+.2%}", is_met=share < GROWTH_BAR)
                for name, share in growth.items()
            ),
            seconds=time.monotonic() - begun,
        )

    def _give_up(self, count: int) -> None:
        """So many requests, after their first output; some at once."""
        for first in range(0, count, _CANCELLED_TOGETHER):
            indices = range(first, min(first + _CANCELLED_TOGETHER, count))
            stream = self.pair.stream([self.requests[index % len(self.requests)] for index in indices])
            next(stream)
            stream.close()
        run_load(self.pair, self.requests[:1])  # vLLM frees what was aborted in its next step

    def _load_with(self, event: Callable[[], None]) -> tuple[Outcome, float]:
        """A load in whose first third it happens, and the seconds from there until the draft was back."""
        happened: list[float] = []

        def happen() -> None:
            event()
            happened.append(time.monotonic())

        outcome = run_load(self.pair, self.requests, {len(self.requests) // 3: happen})
        back_s = self._await_draft()
        return outcome, back_s - happened[0]

    def _lost(self, fault: str, outcomes: Sequence[tuple[Outcome, float]]) -> Row:
        failed = sum(outcome.failed(self.expected) for outcome, _ in outcomes)
        usual = self.calm.longest_gap
        stall = max(outcome.longest_gap_until_a_new_epoch for outcome, _ in outcomes) - usual
        prefill = max(outcome.longest_gap for outcome, _ in outcomes) - usual
        after = run_load(self.pair, self.requests)
        failed += after.failed(self.expected)
        return Row(
            fault=fault,
            requests=len(self.requests) * (len(outcomes) + 1),
            figures=(
                Figure.none("failed or not exact", failed),
                Figure(name="longest stall beyond a step", value=ms(stall), is_met=stall <= STALL_BAR_S),
                # What runs is prefilled again when the draft is back: a step like a prompt's, and as long.
                Figure(name="with the prefill at its return", value=ms(prefill)),
                Figure(name="draft back after", value=span([back for _, back in outcomes])),
            ),
            seconds=sum(outcome.seconds for outcome, _ in outcomes) + after.seconds,
        )

    def _await_draft(self) -> float:
        """When there is one again, by `time.monotonic()`. Raises UserError where none comes."""
        return wait_until(
            lambda: self.pair.speculator.draft_epoch > 0,
            "the draft",
            timeout_s=REJOIN_TIMEOUT_S,
            remedy="look at what its process wrote last",
        )

    def _begin_faults(self, faults: FaultsConfig) -> None:
        self.pair.speculator.faults.begin(faults)

    def _held(self) -> Held:
        """While nothing is being set up: where the machine is busy, the draft may be lost at any time."""
        self._await_draft()
        return Held.of([os.getpid(), self.pair.draft_process.pid, self.pair.coordinator_process.pid])
