"""What ends a stream's wait for a reply that doesn't come: a thread that asks, often, whether the draft is there."""

import threading
import time
from collections import deque
from typing import Final

from cluster.channel.device import DeviceChannel, has_reached
from cluster.channel.errors import ChannelError, DeadlineExceeded

WATCH_INTERVAL_S: Final = 0.01
"""A twentieth of the 200 ms in which a target goes on after the death of its draft. Costs some 10 µs each time."""

_LONGEST_TURN_S: Final = 2 * WATCH_INTERVAL_S
"""That counts. Where a watch itself stood still for longer, so may the draft have, and it isn't to blame for that."""


class RoundWatch:
    """Which rounds the target's stream waits for, and why it is to wait no longer. No thread, no clock, no GPU.

    A round's time begins with the first look that finds the stream there, so what the target computes before is no part
    of it, and up to a turn of the wait isn't either.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, float]] = deque()
        self._newest = 0
        self._lost: ChannelError | None = None
        self._looked_s = 0.0
        self._waited_s: float | None = None
        """For the first of those that wait; None before the stream is there."""

    @property
    def lost(self) -> ChannelError | None:
        """For good: a draft that missed a round can't serve a later one."""
        return self._lost

    @property
    def newest(self) -> int:
        return self._newest

    def begin(self, step: int, limit_s: float) -> None:
        """The stream will come to this step, and is to wait there for no longer. Raises the ChannelError that the
        rounds ended with, if so."""
        if self._lost is not None:
            raise self._lost
        self._waiting.append((step, limit_s))
        self._newest = step

    def look(self, *, requested: int, replied: int, now_s: float, gone: ChannelError | None) -> None:
        """The flags REQUEST and REPLY; `gone` is why there is nobody any more. All looked at in the order gone,
        requested, replied."""
        turn_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_TURN_S), now_s
        while self._waiting and has_reached(replied, self._waiting[0][0]):
            self._waiting.popleft()
            self._waited_s = None
        if gone is not None:
            self.lose(gone)
        elif self._waiting and has_reached(requested, self._waiting[0][0]):
            self._waited_s = 0.0 if self._waited_s is None else self._waited_s + turn_s
            self._judge(*self._waiting[0], self._waited_s)

    def lose(self, error: ChannelError) -> None:
        """The first one counts."""
        if self._lost is None:
            self._lost = error

    def _judge(self, step: int, limit_s: float, waited_s: float) -> None:
        if waited_s > limit_s:
            self.lose(DeadlineExceeded(f"no reply to round {step} in {waited_s:.3f} s, {limit_s:.3f} s were allowed"))


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

    @property
    def lost(self) -> ChannelError | None:
        """As of a RoundWatch; known before the stream is let go."""
        return self._watch.lost

    def begin(self, step: int, limit_s: float) -> None:
        """As of a RoundWatch. From here on the wait for this step ends, whatever becomes of the draft."""
        with self._lock:
            self._watch.begin(step, limit_s)

    def lose(self, error: ChannelError) -> None:
        """Let go of all waits, begin no other, and end the channel. From any thread, at any time."""
        with self._lock:
            if self._stopped.is_set():
                return  # and the channel may be closed
            self._watch.lose(error)
            self._let_go()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_INTERVAL_S):
            with self._lock:
                self._look()
                if self._watch.lost is not None:
                    self._let_go()

    def _look(self) -> None:
        gone = self._channel.gone()  # asked first: what the draft did before it went is there by now
        requested = self._channel.requested
        self._watch.look(requested=requested, replied=self._channel.replied, now_s=time.monotonic(), gone=gone)

    def _let_go(self) -> None:
        self._channel.release(self._watch.newest)
        self._channel.abort()  # the target's CPU may wait, too: for room for a notice to a draft that hangs
