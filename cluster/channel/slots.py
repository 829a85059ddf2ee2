"""A few message buffers between two threads of this process: one fills them, the other empties them, in order."""

import threading
import time
from collections.abc import Callable

from cluster.channel.errors import ChannelError, DeadlineExceeded


class SlotQueue:
    """Whoever waits sleeps on a condition, until there is a slot, an error, or its deadline.

    The buffers are their owner's; the queue only counts slots. The filling thread calls `wait_free`, writes into slot
    `filling` and calls `filled`; the emptying one calls `wait_filled`, reads slot `emptying` and calls `emptied`.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_filled = 0
        self._num_emptied = 0
        self._lengths = [0] * num_slots
        self._error: ChannelError | None = None
        self._changed = threading.Condition()

    @property
    def error(self) -> ChannelError | None:
        """What it ended with."""
        return self._error

    @property
    def filling(self) -> int:
        return self._num_filled % self._num_slots

    @property
    def emptying(self) -> int:
        return self._num_emptied % self._num_slots

    def wait_free(self, deadline_s: float, late: str) -> None:
        """Raises DeadlineExceeded saying `late`, or the error the queue ended with."""
        with self._changed:
            self._wait(lambda: self._error is not None or self._has_free(), deadline_s, late)
            if self._error is not None:
                raise self._error

    def filled(self, num_bytes: int) -> None:
        with self._changed:
            self._lengths[self.filling] = num_bytes
            self._num_filled += 1
            self._changed.notify_all()

    def wait_filled(self, deadline_s: float, late: str) -> int:
        """Returns the message's length. An error waits until the queue is empty."""
        with self._changed:
            self._wait(lambda: self._error is not None or self._has_filled(), deadline_s, late)
            if not self._has_filled() and self._error is not None:
                raise self._error
            return self._lengths[self.emptying]

    def emptied(self) -> None:
        with self._changed:
            self._num_emptied += 1
            self._changed.notify_all()

    def fail(self, error: ChannelError, *, drop: bool = False) -> None:
        """Nothing will be filled any more, for this reason; the first one counts. `drop` forgets what is left."""
        with self._changed:
            if self._error is None:
                self._error = error
            if drop:
                self._num_emptied = self._num_filled
            self._changed.notify_all()

    def _has_free(self) -> bool:
        return self._num_filled - self._num_emptied < self._num_slots

    def _has_filled(self) -> bool:
        return self._num_filled > self._num_emptied

    def _wait(self, is_over: Callable[[], bool], deadline_s: float, late: str) -> None:
        if is_over():
            return
        started = time.monotonic()
        # Beyond TIMEOUT_MAX a condition can't count; three centuries are as good as for ever.
        timeout_s = min(deadline_s - started, threading.TIMEOUT_MAX)
        if not self._changed.wait_for(is_over, timeout_s):
            raise DeadlineExceeded(f"{late} in {time.monotonic() - started:.3f} s")
