"""Messages from one process to another through shared memory: one writer, one reader, a few slots.

    offset 0    published: how many messages were written, mod 2^32. Stored by the writer, after the message.
           64   consumed: how many were read, mod 2^32. Stored by the reader, after it copied the message.
           128  slots, each: length u64, padded to 64; then the message, padded to 64

Each counter is on a cache line of its own, and is the futex that the other side sleeps on. Slot number `count % slots`
belongs to the writer until `published` says otherwise, then to the reader until `consumed` does. Each side counts for
itself and only compares with the other's counter, so a counter that runs over is no event.
"""

import struct
from collections.abc import Sequence
from typing import Final

from cluster.channel import futex
from cluster.channel.base import require_room
from cluster.channel.errors import ChannelCorrupted
from cluster.channel.segment import SharedSegment

_LINE: Final = 64
_CONSUMED: Final = _LINE
_SLOTS: Final = 2 * _LINE
_MASK: Final = 2**32 - 1
_LENGTH: Final = struct.Struct("<Q")


def ring_bytes(num_slots: int, max_bytes: int) -> int:
    return _SLOTS + num_slots * _slot_bytes(max_bytes)


class _Ring:
    def __init__(self, segment: SharedSegment, offset: int, num_slots: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._segment = segment
        self._num_slots = num_slots
        self._slots = offset + _SLOTS
        self._published = offset
        self._consumed = offset + _CONSUMED
        self._count = 0

    def wake(self) -> None:
        """Whoever sleeps on this ring, on either side, looks again."""
        futex.wake(self._segment.address(self._published))
        futex.wake(self._segment.address(self._consumed))

    def _message_offset(self) -> int:
        return self._slots + self._count % self._num_slots * _slot_bytes(self.max_bytes) + _LINE

    def _in_flight(self, published: int, consumed: int) -> int:
        in_flight = (published - consumed) & _MASK
        if in_flight > self._num_slots:
            raise ChannelCorrupted(f"{in_flight} messages are on their way, the ring has {self._num_slots} slots")
        return in_flight

    def _advance(self, counter: int) -> None:
        futex.fence()
        self._count += 1
        self._segment.words[counter // 4] = self._count & _MASK
        futex.wake(self._segment.address(counter))


class RingWriter(_Ring):
    def is_ready(self) -> bool:
        """Whether a slot is free."""
        return self._in_flight(self._count, self._segment.words[self._consumed // 4]) < self._num_slots

    def wait(self, timeout_s: float) -> None:
        """Sleep until the reader has freed a slot, or somebody wakes the ring, or `timeout_s` is over."""
        seen = self._segment.words[self._consumed // 4]
        if not self.is_ready():
            futex.wait(self._segment.address(self._consumed), seen, timeout_s)

    def write(self, parts: Sequence[memoryview], num_bytes: int) -> None:
        """Into the free slot that `is_ready` has seen."""
        futex.fence()
        offset = self._message_offset()
        memory = self._segment.memory
        _LENGTH.pack_into(memory, offset - _LINE, num_bytes)
        for part in parts:
            memory[offset : offset + part.nbytes] = part.cast("B")
            offset += part.nbytes
        self._advance(self._published)


class RingReader(_Ring):
    def is_ready(self) -> bool:
        """Whether a message is there."""
        return self._in_flight(self._segment.words[self._published // 4], self._count) > 0

    def wait(self, timeout_s: float) -> None:
        """Sleep until the writer has published a message, or somebody wakes the ring, or `timeout_s` is over."""
        seen = self._segment.words[self._published // 4]
        if not self.is_ready():
            futex.wait(self._segment.address(self._published), seen, timeout_s)

    def read(self, into: memoryview) -> int:
        """The message that `is_ready` has seen."""
        futex.fence()
        offset = self._message_offset()
        (num_bytes,) = _LENGTH.unpack_from(self._segment.memory, offset - _LINE)
        if not 0 < num_bytes <= self.max_bytes:
            raise ChannelCorrupted(f"a message of {num_bytes} bytes, the ring's slots hold 1 to {self.max_bytes}")
        require_room(into, num_bytes)
        into.cast("B")[:num_bytes] = self._segment.memory[offset : offset + num_bytes]
        self._advance(self._consumed)
        return int(num_bytes)


def _slot_bytes(max_bytes: int) -> int:
    return _LINE + -(-max_bytes // _LINE) * _LINE
