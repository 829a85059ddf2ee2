"""A load on one pair, something that happens in its middle, and what its requests saw of that."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.separate import SeparateEngine

Tokens = tuple[int, ...]

_PROMPT_TOKENS = (4, 40)
_ANSWER_TOKENS = (12, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Between two outputs of one request, in seconds. `away`: when the later one came, there was no draft; `epoch` is
    that of the last one then."""

    seconds: float
    epoch: int
    away: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a load."""

    answers: list[Tokens]
    finished: int
    seconds: float
    gaps: list[Gap]

    @property
    def longest_gap(self) -> float:
        return max(gap.seconds for gap in self.gaps)

    @property
    def usual_gap_without_draft(self) -> float:
        """The median, of a target that has none or while it is away."""
        return statistics.median(gap.seconds for gap in self.gaps if gap.away)

    @property
    def longest_gap_until_a_new_epoch(self) -> float:
        return max(gap.seconds for gap in self.gaps if gap.epoch == self.gaps[0].epoch)

    def failed(self, expected: Sequence[Tokens]) -> int:
        """Requests without an end, or with other tokens than they should have."""
        pairs = zip(self.answers, expected, strict=True)
        return sum(answer != right for answer, right in pairs) + len(self.answers) - self.finished


def some_requests(count: int, *, vocab_size: int, seed: int = 0) -> list[GenerationRequest]:
    """Greedy ones, of unequal length; each third begins as the one before it, for the prefix cache."""
    choose = random.Random(seed)
    requests: list[GenerationRequest] = []
    for index in range(count):
        prompt = tuple(choose.randrange(vocab_size) for _ in range(choose.randint(*_PROMPT_TOKENS)))
        if index % 3 == 2:
            prompt = (*requests[-1].prompt_token_ids, *prompt[:4])
        most = choose.randint(*_ANSWER_TOKENS)
        requests.append(GenerationRequest(prompt_token_ids=prompt, max_tokens=most, ignore_eos=True))
    return requests


def run_load(
    engine: InProcessEngine,
    requests: Sequence[GenerationRequest],
    events: Mapping[int, Callable[[], None]] | None = None,
) -> Outcome:
    """Run them all together; an event happens when so many requests have ended."""
    answers: list[list[int]] = [[] for _ in requests]
    last: list[float | None] = [None for _ in requests]
    waiting = dict(events or {})
    finished, gaps = 0, list[Gap]()
    begun = time.monotonic()
    for delta in engine.stream(requests):
        now, before = time.monotonic(), last[delta.index]
        last[delta.index] = now
        if before is not None:
            gaps.append(_gap(engine, now - before))
        answers[delta.index].extend(delta.token_ids)
        if delta.finish_reason is not None:
            finished += 1
            if finished in waiting:
                waiting.pop(finished)()
    return Outcome(
        answers=[tuple(answer) for answer in answers],
        finished=finished,
        seconds=time.monotonic() - begun,
        gaps=gaps,
    )


def run_by_turns(
    one: InProcessEngine, other: InProcessEngine, requests: Sequence[GenerationRequest]
) -> list[tuple[float, float]]:
    """The seconds of each step, of two engines that make the same steps of the same requests: by turns, so that what
    else the machine does slows both down alike."""
    seconds = list[float](), list[float]()
    with closing(one.steps(requests)) as ones, closing(other.steps(requests)) as others:
        turns = [(ones, seconds[0]), (others, seconds[1])]
        while True:
            for steps, taken in turns:
                begun = time.perf_counter()
                if next(steps, None) is None:
                    return list(zip(*seconds, strict=False))
                taken.append(time.perf_counter() - begun)
            turns.reverse()


def _gap(engine: InProcessEngine, seconds: float) -> Gap:
    if not isinstance(engine, SeparateEngine):
        return Gap(seconds=seconds, epoch=0, away=True)
    speculator = engine.speculator
    return Gap(seconds=seconds, epoch=speculator.report.epoch, away=speculator.draft_epoch == 0)
