"""Who runs, who waits, who is refused: a bounded number of choices runs, a bounded number waits, the rest is refused.

Pure asyncio, no engine: `enter` never waits, so a full server answers at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

SHORTEST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 30.0
"""Bounds of the hint: a burst shouldn't come back at once, and a server that has recovered shouldn't idle."""

_FIRST_GUESS_S: Final = 1.0
_SMOOTHING: Final = 0.1


class QueueFullError(Exception):
    """There is no room; `retry_after_s` is when there may be."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """A place for `choices` choices; `admitted` is set once they may run."""

    choices: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = 0.0


class Admission:
    """First come, first served; a request with many choices isn't overtaken by one with few."""

    def __init__(self, *, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._clock = clock
        self._running = 0
        self._waiting: deque[Ticket] = deque()
        self._service_s = _FIRST_GUESS_S

    @property
    def running(self) -> int:
        """Choices that run."""
        return self._running

    @property
    def queued(self) -> int:
        """Choices that wait."""
        return sum(ticket.choices for ticket in self._waiting)

    def enter(self, choices: Sequence[int]) -> list[Ticket]:
        """Tickets for requests with so many choices each (at most `max_running`), or QueueFullError for all."""
        if self._running + self.queued + sum(choices) > self._max_running + self._max_queued:
            raise QueueFullError(self._retry_after())
        tickets = [Ticket(choices=each) for each in choices]
        self._waiting.extend(tickets)
        self._admit()
        return tickets

    def leave(self, ticket: Ticket) -> None:
        """Give the place back, whether it ran or waited. A second call does nothing."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        elif ticket.choices:
            self._running -= ticket.choices
            self._service_s += _SMOOTHING * (self._clock() - ticket.started - self._service_s)
        ticket.choices = 0
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._running + self._waiting[0].choices <= self._max_running:
            ticket = self._waiting.popleft()
            self._running += ticket.choices
            ticket.started = self._clock()
            ticket.admitted.set()

    def _retry_after(self) -> float:
        """When the half of the queue should have gone, at the pace of late."""
        drained = self._service_s * (self.queued / 2 + 1) / self._max_running
        return min(max(drained, SHORTEST_RETRY_S), LONGEST_RETRY_S)
