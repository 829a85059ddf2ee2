"""Whether drafts pay, by the size of the batch: what a step with them takes a token, against a step without."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOSES_FROM: Final = 1.05
WINS_BELOW: Final = 0.95
"""Seconds a token with drafts, over those without. Between the two, all stays as it is: a draft that is about as good
as none would be switched off and on for ever."""

_STEPS: Final = 32
"""Of one batch size, before anything is decided by them."""

_WEIGHT: Final = 1 / 16
"""Of the latest step in the averages."""

FIRST_REST_S: Final = 30.0
LONGEST_REST_S: Final = 600.0
"""Until drafts are tried again: doubled each time that they lose again. To resume costs the running requests a
prefill."""


@dataclass(slots=True)
class _Size:
    """Averages for batches of about one size. Seconds are of a step, for each token that a request got in it."""

    steps: int = 0
    with_drafts_s: float = 0.0
    without_s: float = 0.0
    knows_without: bool = False
    """Measured. Before that, `without_s` is a step with drafts less its round: more than a plain step takes, so that a
    draft is never switched off for what it might have cost."""
    rests_until_s: float | None = None
    rest_s: float = FIRST_REST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A decision: whether batches of up to so many requests, and more than half as many, have drafts."""

    num_reqs: int
    drafts: bool
    ratio: float
    """Seconds a token with drafts, over those without."""


class Budget:
    """No thread, no torch. `observe` after each step in which all requests decoded; `rests` before the next."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}

    def rests(self, num_reqs: int) -> bool:
        """Whether a batch of so many is to go on without drafts now."""
        size = self._sizes.get(num_reqs.bit_length())
        return size is not None and size.rests_until_s is not None and self._clock() < size.rests_until_s

    def observe(self, num_reqs: int, num_tokens: int, step_s: float, round_s: float | None) -> Switch | None:
        """A step in which `num_reqs` requests got `num_tokens` tokens; `round_s` is the part of it that the draft was
        waited for, None without one. A decision, if it makes one."""
        size = self._sizes.setdefault(num_reqs.bit_length(), _Size())
        a_token_s = step_s * num_reqs / num_tokens
        if round_s is None:
            size.without_s = _average(size.without_s, a_token_s) if size.knows_without else a_token_s
            size.knows_without = True
            return None
        if size.rests_until_s is not None:  # over: they are tried again
            size.rests_until_s, size.steps = None, 0
        size.steps += 1
        if not size.knows_without:
            size.without_s = _average(size.without_s, step_s - round_s) if size.steps > 1 else step_s - round_s
        size.with_drafts_s = _average(size.with_drafts_s, a_token_s) if size.steps > 1 else a_token_s
        if size.steps < _STEPS or size.without_s <= 0:
            return None
        return self._decide(num_reqs, size, size.with_drafts_s / size.without_s)

    def _decide(self, num_reqs: int, size: _Size, ratio: float) -> Switch | None:
        most = (1 << num_reqs.bit_length()) - 1
        if ratio >= LOSES_FROM:
            size.rests_until_s = self._clock() + size.rest_s
            size.rest_s = min(2 * size.rest_s, LONGEST_REST_S)
            return Switch(num_reqs=most, drafts=False, ratio=ratio)
        if ratio < WINS_BELOW and size.rest_s > FIRST_REST_S:
            size.rest_s = FIRST_REST_S
            return Switch(num_reqs=most, drafts=True, ratio=ratio)
        return None


def _average(before: float, latest: float) -> float:
    return before + _WEIGHT * (latest - before)
