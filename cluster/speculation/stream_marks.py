"""Where the time of a round goes on the target's stream, by CUDA events."""

import itertools
import statistics
from collections.abc import Callable
from typing import Final, Literal

import torch

Mark = Literal["begun", "encoded", "replied", "taken"]
"""The points of a round, in their order."""

PARTS: Final[dict[str, tuple[Mark, Mark]]] = {
    "encode": ("begun", "encoded"),
    "wait": ("encoded", "replied"),
    "take": ("replied", "taken"),
}
"""`wait` has the way there and back, and the draft."""

STEP: Final = "step"
"""From one round's beginning to the next one's."""


class StreamMarks:
    """Records an event each time that a round comes to one of its points; they cost some microseconds."""

    def __init__(self, new_event: Callable[[], torch.cuda.Event]) -> None:
        """`new_event` makes one that has a time."""
        self._new_event = new_event
        self._rounds: list[dict[Mark, torch.cuda.Event]] = []

    def mark(self, point: Mark) -> None:
        if point == "begun":
            self._rounds.append({})
        event = self._new_event()
        event.record()
        self._rounds[-1][point] = event

    def take_microseconds(self) -> dict[str, float]:
        """Medians of the rounds so far, by part, and forget them. The stream must have passed them all.

        Empty where there were none. A round that was broken off has no say.
        """
        rounds = [marks for marks in self._rounds if "taken" in marks]
        self._rounds = []
        times = {part: [_between(marks[one], marks[other]) for marks in rounds] for part, (one, other) in PARTS.items()}
        begun = [marks["begun"] for marks in rounds]
        times[STEP] = [_between(one, other) for one, other in itertools.pairwise(begun)]
        return {part: statistics.median(values) for part, values in times.items() if values}


def _between(one: torch.cuda.Event, other: torch.cuda.Event) -> float:
    return 1e3 * float(one.elapsed_time(other))
