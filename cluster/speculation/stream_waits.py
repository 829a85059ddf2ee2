"""What the target's stream waits for its draft, by the stream's own clock."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from cluster.channel.device import StreamEvent


class Wait(NamedTuple):
    num_tokens: int
    kind: Hashable
    """Of the round, beside its length."""
    seconds: float


class StreamWaits:
    """Two events a round, read when the stream has passed them. The first costs nothing that counts, as the stream is
    about to wait; the second about a microsecond. For the thread that puts the rounds on the stream."""

    def __init__(self, new_event: Callable[[], StreamEvent]) -> None:
        self._new_event = new_event
        self._under_way: deque[tuple[int, Hashable, StreamEvent, StreamEvent]] = deque()
        self._free: list[StreamEvent] = []

    def begin(self, num_tokens: int, kind: Hashable) -> None:
        """The request has been put on the stream, and what waits for the reply comes next."""
        begun, ended = self._event(), self._event()
        begun.record()
        self._under_way.append((num_tokens, kind, begun, ended))

    def end(self) -> None:
        """The stream goes on behind it."""
        self._under_way[-1][-1].record()

    def passed(self) -> Iterator[Wait]:
        """Those that the stream has passed since the last call, in their order. Not between `begin` and `end`."""
        while self._under_way and self._under_way[0][-1].query():
            num_tokens, kind, begun, ended = self._under_way.popleft()
            yield Wait(num_tokens, kind, begun.elapsed_time(ended) / 1e3)
            self._free += (begun, ended)

    def _event(self) -> StreamEvent:
        return self._free.pop() if self._free else self._new_event()
