"""The channel between two processes of one host: a ring of shared memory in each direction.

    offset 0    magic 8s, num_slots u32, max_bytes_from_offerer u64, max_bytes_from_opener u64
           64   state of the offerer u32
           128  state of the opener u32, its pid u32, its start u64
           192  ring from the offerer, then, on the next cache line, ring from the opener

The segment's name is gone as soon as the peer has mapped it, so the kernel frees the memory with the last of the two
processes, however they end.
"""

import fcntl
import os
import struct
import time
from collections.abc import Sequence
from typing import Final

from cluster.channel import futex
from cluster.channel.base import (
    Channel,
    ChannelAddress,
    ChannelOffer,
    message_length,
)
from cluster.channel.errors import ChannelClosed, ChannelError, ChannelUnavailable, DeadlineExceeded, PeerDied
from cluster.channel.process import ProcessIdentity, ProcessWatch
from cluster.channel.ring import RingReader, RingWriter, ring_bytes
from cluster.channel.segment import (
    SharedSegment,
    creator_of,
    open_descriptor,
    remove_orphans,
    require_shared,
    unlink,
)

WATCH_INTERVAL_S: Final = 0.05
"""How often a side that waits asks whether its peer lives: a quarter of the 200 ms in which it must know."""

SPIN_S: Final = 20e-6
"""Waiting this long awake costs less than the sleep and wake-up that it may save."""

_HEADER: Final = struct.Struct("<8sI4xQQ")
_MAGIC: Final = b"DSPKSHM1"
_OFFERER: Final = 64
_OPENER: Final = 128
_OPENER_IDENTITY: Final = struct.Struct("<IQ")
_RINGS: Final = 192

_ABSENT: Final = 0
_OPEN: Final = 1
_CLOSED: Final = 2


class ShmOffer(ChannelOffer):
    def __init__(self, *, max_send_bytes: int, max_receive_bytes: int, num_slots: int) -> None:
        """Raises ChannelUnavailable where shared memory can't be had."""
        futex.require_ordered_memory()
        remove_orphans()
        opener_ring = _opener_ring(num_slots, max_send_bytes)
        self._segment = SharedSegment.create(opener_ring + ring_bytes(num_slots, max_receive_bytes))
        self.address = ChannelAddress(
            kind="shm",
            location=self._segment.name,
            num_slots=num_slots,
            max_bytes_from_offerer=max_send_bytes,
            max_bytes_from_opener=max_receive_bytes,
        )
        _HEADER.pack_into(self._segment.memory, 0, _MAGIC, num_slots, max_send_bytes, max_receive_bytes)
        self._segment.words[_OFFERER // 4] = _OPEN
        self._is_spent = False

    def accept(self, deadline_s: float) -> "ShmChannel":
        words = self._segment.words
        while words[_OPENER // 4] == _ABSENT:
            remaining = deadline_s - time.monotonic()
            if remaining <= 0:
                self.withdraw()
                raise DeadlineExceeded(f"nobody opened the channel {self.address.location}")
            futex.wait(self._segment.address(_OPENER), _ABSENT, min(remaining, WATCH_INTERVAL_S))
        futex.fence()
        opener = ProcessIdentity(*_OPENER_IDENTITY.unpack_from(self._segment.memory, _OPENER + 4))
        try:
            watch = ProcessWatch(opener)
        except ProcessLookupError as error:
            self.withdraw()
            raise PeerDied(f"the peer opened the channel and ended: {error}") from None
        self._is_spent = True
        unlink(self.address.location)
        return ShmChannel(self._segment, self.address, watch, is_offerer=True)

    def withdraw(self) -> None:
        if self._is_spent:
            return
        self._is_spent = True
        self._segment.words[_OFFERER // 4] = _CLOSED
        unlink(self.address.location)
        self._segment.close()


class ShmChannel(Channel):
    def __init__(
        self, segment: SharedSegment, address: ChannelAddress, watch: ProcessWatch, *, is_offerer: bool
    ) -> None:
        self._segment = segment
        self._watch = watch
        self._is_closed = False
        self._own_state, self._peer_state = (_OFFERER, _OPENER) if is_offerer else (_OPENER, _OFFERER)
        offerer_ring = (_RINGS, address.num_slots, address.max_bytes_from_offerer)
        opener_ring = (
            _opener_ring(address.num_slots, address.max_bytes_from_offerer),
            address.num_slots,
            address.max_bytes_from_opener,
        )
        sending, receiving = (offerer_ring, opener_ring) if is_offerer else (opener_ring, offerer_ring)
        self._writer = RingWriter(segment, *sending)
        self._reader = RingReader(segment, *receiving)
        self.max_send_bytes = self._writer.max_bytes
        self.max_receive_bytes = self._reader.max_bytes

    @staticmethod
    def check(address: ChannelAddress) -> None:
        """Raises ChannelUnavailable where this process can't open what another one offers, as long as that lives."""
        futex.require_ordered_memory()
        require_shared(address.location)

    @classmethod
    def open(cls, address: ChannelAddress) -> "ShmChannel":
        """Raises ChannelUnavailable where the offer is gone, taken, or not what the address says."""
        futex.require_ordered_memory()
        offerer = creator_of(address.location)
        descriptor = open_descriptor(address.location)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # two may have got the address; only one sees ABSENT
            segment = SharedSegment.open(address.location, descriptor)
            try:
                _require_offer(segment, address)
                watch = ProcessWatch(offerer)
            except ProcessLookupError:
                segment.close()
                raise _unusable(address, "the process that offered it has ended") from None
            except ChannelUnavailable:
                segment.close()
                raise
            me = ProcessIdentity.current()
            _OPENER_IDENTITY.pack_into(segment.memory, _OPENER + 4, me.pid, me.start_ticks)
            futex.fence()
            segment.words[_OPENER // 4] = _OPEN
        finally:
            os.close(descriptor)
        unlink(address.location)
        futex.wake(segment.address(_OPENER))
        return cls(segment, address, watch, is_offerer=False)

    def send(self, parts: Sequence[memoryview], deadline_s: float) -> int:
        num_bytes = message_length(parts, self.max_send_bytes)
        gone = self.gone()
        if gone is not None:
            raise gone
        self._wait_for(self._writer, deadline_s, "the peer made no room")
        self._writer.write(parts, num_bytes)
        return num_bytes

    def recv(self, into: memoryview, deadline_s: float) -> int:
        if self._is_closed:
            raise ChannelClosed("this side closed the channel")
        self._wait_for(self._reader, deadline_s, "the peer sent nothing")
        return self._reader.read(into)

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._segment.words[self._own_state // 4] = _CLOSED
        self._writer.wake()
        self._reader.wake()

    def await_peer_end(self, timeout_s: float) -> bool:
        """Whether the peer's process has ended, or ends in this time. Not after `close`."""
        return self._watch.has_ended(timeout_s)

    def close(self) -> None:
        self.abort()
        if self._watch.is_open:
            self._watch.close()
            self._segment.close()

    def _wait_for(self, ring: RingWriter | RingReader, deadline_s: float, late: str) -> None:
        if ring.is_ready():
            return
        started = time.monotonic()
        while time.monotonic() < min(started + SPIN_S, deadline_s):
            if ring.is_ready():
                return
        while True:
            gone = self.gone()  # asked first: what the peer sent before it went is there by now
            if ring.is_ready():
                return
            if gone is not None:
                raise gone
            remaining = deadline_s - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(f"{late} in {time.monotonic() - started:.3f} s")
            ring.wait(min(remaining, WATCH_INTERVAL_S))

    def gone(self) -> ChannelError | None:
        """Why there is nobody to talk to, if so. About a microsecond."""
        if self._is_closed:
            return ChannelClosed("this side closed the channel")
        if self._segment.words[self._peer_state // 4] == _CLOSED:
            return ChannelClosed("the peer closed the channel")
        if self._watch.has_ended():
            return PeerDied(f"process {self._watch.process.pid} ended without closing the channel")
        return None


def _opener_ring(num_slots: int, max_bytes_from_offerer: int) -> int:
    return _RINGS + ring_bytes(num_slots, max_bytes_from_offerer)


def _require_offer(segment: SharedSegment, address: ChannelAddress) -> None:
    sizes = (address.num_slots, address.max_bytes_from_offerer, address.max_bytes_from_opener)
    num_bytes = _opener_ring(*sizes[:2]) + ring_bytes(address.num_slots, address.max_bytes_from_opener)
    if len(segment.memory) != num_bytes or _HEADER.unpack_from(segment.memory) != (_MAGIC, *sizes):
        raise _unusable(address, "its memory isn't laid out as its address says")
    if segment.words[_OFFERER // 4] != _OPEN:
        raise _unusable(address, "the offer was withdrawn")
    if segment.words[_OPENER // 4] != _ABSENT:
        raise _unusable(address, "another process has opened it")


def _unusable(address: ChannelAddress, why: str) -> ChannelUnavailable:
    return ChannelUnavailable(f"the channel {address.location}", why, "ask for a new offer")
