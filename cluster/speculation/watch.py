"""What ends a stream's wait for a reply that doesn't come: a thread that asks, often, whether the draft is there."""

import threading
import time
from collections import deque
from typing import Final

from cluster.channel.device import DeviceChannel, has_reached
from cluster.channel.errors import ChannelError, DeadlineExceeded

WATCH_INTERVAL_S: Final = 0.01
"""A twentieth of the 200 ms in which a target goes on after the death of its draft. Costs some 10 µs each time."""


class RoundWatch:
    """Which rounds the target's stream waits for, and why it is to wait no longer. No thread, no clock, no GPU."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, float]] = deque()
        self._newest = 0
        self._lost: ChannelError | None = None

    @property
    def lost(self) -> ChannelError | None:
        """For good: a draft that missed a round can't serve a later one."""
        return self._lost

    @property
    def newest(self) -> int:
        return self._newest

    def begin(self, step: int, deadline_s: float) -> None:
        """The stream is about to wait for this step. Raises the ChannelError that the rounds ended with, if so."""
        if self._lost is not None:
            raise self._lost
        self._waiting.append((step, deadline_s))
        self._newest = step

    def look(self, replied: int, now_s: float, gone: ChannelError | None) -> None:
        """`replied` is the flag REPLY; `gone` why there is nobody any more, looked at before it."""
        while self._waiting and has_reached(replied, self._waiting[0][0]):
            self._waiting.popleft()
        if gone is not None:
            self.lose(gone)
        elif self._waiting and now_s > self._waiting[0][1]:
            self.lose(DeadlineExceeded(f"no reply to round {self._waiting[0][0]} within its deadline"))

    def lose(self, error: ChannelError) -> None:
        """The first one counts."""
        if self._lost is None:
            self._lost = error


class Watchdog:
    """A RoundWatch with a clock and a thread.

    Once the draft is lost it sets the flag again and again, until `stop`: a late draft's stream may yet set it to an
    earlier step, and the target's stream would wait for a later one.
    """

    def __init__(self, channel: DeviceChannel) -> None:
        self._channel = channel
        self._watch = RoundWatch()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-watchdog", daemon=True)
        self._thread.start()

    def begin(self, step: int, deadline_s: float) -> None:
        """As of a RoundWatch. From here on the wait for this step ends, whatever becomes of the draft."""
        with self._lock:
            self._watch.begin(step, deadline_s)

    def lose(self, error: ChannelError) -> None:
        """Let go of all waits, and begin no other."""
        with self._lock:
            self._watch.lose(error)
            self._release()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_INTERVAL_S):
            with self._lock:
                gone = self._channel.gone()  # asked first: what the draft did before it went is there by now
                self._watch.look(self._channel.replied, time.monotonic(), gone)
                self._release()

    def _release(self) -> None:
        if self._watch.lost is not None:
            self._channel.release(self._watch.newest)
