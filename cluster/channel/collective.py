"""The channel between processes of any two hosts: torch.distributed, with gloo on CPUs.

A message is a header of a fixed size, then its bytes. Two threads of the channel wait in gloo, one to send and one to
receive, and pass messages on through a few buffers. So a deadline only ends the wait for a buffer: the connection
outlives it, as it must, for a late draft is no dead one. `abort` ends the same waits at once, then breaks the
connection, which ends the threads. A peer that dies resets the connection, which gloo reports within milliseconds;
one whose host loses power doesn't, and is left to the deadlines here and the heartbeat of the control connection.
"""

import threading
from collections.abc import Sequence
from typing import Final

import torch

from cluster.channel.base import (
    Channel,
    ChannelAddress,
    ChannelOffer,
    message_length,
    require_room,
)
from cluster.channel.errors import ChannelClosed, ChannelCorrupted, ChannelError, PeerDied
from cluster.channel.gloo_group import GlooGroup, GlooRendezvous, join
from cluster.channel.slots import SlotQueue

DRAIN_TIMEOUT_S: Final = 0.5
"""How long a close waits for what was sent to leave this host. A peer that takes longer isn't receiving."""

JOIN_TIMEOUT_S: Final = 5.0
"""For the two threads to end after the connection broke. It takes milliseconds; a stopped machine may take more."""

_MAGIC: Final = 0x314F4C474B505344  # "DSPKGLO1"
_GOODBYE: Final = 0
_FOR_EVER: Final = float("inf")


class GlooOffer(ChannelOffer):
    def __init__(self, *, max_send_bytes: int, max_receive_bytes: int, num_slots: int, host: str) -> None:
        """Raises ChannelUnavailable where nothing can listen on `host`."""
        self._rendezvous: GlooRendezvous | None = GlooRendezvous(host)
        self.address = ChannelAddress(
            kind="gloo",
            location=self._rendezvous.location,
            num_slots=num_slots,
            max_bytes_from_offerer=max_send_bytes,
            max_bytes_from_opener=max_receive_bytes,
        )

    def accept(self, deadline_s: float) -> "GlooChannel":
        if self._rendezvous is None:
            raise ChannelClosed("the offer was withdrawn or accepted before")
        rendezvous, self._rendezvous = self._rendezvous, None
        sizes = (self.address.max_bytes_from_offerer, self.address.max_bytes_from_opener)
        return GlooChannel(rendezvous.accept(deadline_s), self.address.num_slots, *sizes)

    def withdraw(self) -> None:
        self._rendezvous = None


class GlooChannel(Channel):
    def __init__(self, group: GlooGroup, num_slots: int, max_send_bytes: int, max_receive_bytes: int) -> None:
        self.max_send_bytes = max_send_bytes
        self.max_receive_bytes = max_receive_bytes
        self._group = group
        self._is_ended = threading.Event()
        self._outgoing, self._incoming = SlotQueue(num_slots), SlotQueue(num_slots)
        self._send_buffers = torch.empty((num_slots, max_send_bytes), dtype=torch.uint8)
        self._receive_buffers = torch.empty((num_slots, max_receive_bytes), dtype=torch.uint8)
        self._send_views = [memoryview(row.numpy()) for row in self._send_buffers]
        self._receive_views = [memoryview(row.numpy()) for row in self._receive_buffers]
        self._threads = [
            threading.Thread(target=self._send_all, name="dspark-gloo-send", daemon=True),
            threading.Thread(target=self._receive_all, name="dspark-gloo-receive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def open(cls, address: ChannelAddress, deadline_s: float, *, host: str) -> "GlooChannel":
        """Raises ChannelUnavailable where nobody offers, DeadlineExceeded where the peer stops halfway."""
        sizes = (address.max_bytes_from_opener, address.max_bytes_from_offerer)
        return cls(join(address.location, host, deadline_s), address.num_slots, *sizes)

    def send(self, parts: Sequence[memoryview], deadline_s: float) -> int:
        num_bytes = message_length(parts, self.max_send_bytes)
        self._outgoing.wait_free(deadline_s, "the peer made no room")
        buffer, end = self._send_views[self._outgoing.filling], 0
        for part in parts:
            start, end = end, end + part.nbytes
            buffer[start:end] = part.cast("B")
        self._outgoing.filled(num_bytes)
        return num_bytes

    def recv(self, into: memoryview, deadline_s: float) -> int:
        num_bytes = self._incoming.wait_filled(deadline_s, "the peer sent nothing")
        require_room(into, num_bytes)
        into.cast("B")[:num_bytes] = self._receive_views[self._incoming.emptying][:num_bytes]
        self._incoming.emptied()
        return num_bytes

    def abort(self) -> None:
        if self._is_ended.is_set():
            return
        self._is_ended.set()
        error = ChannelClosed("this side closed the channel")
        self._outgoing.fail(error, drop=True)
        self._incoming.fail(error, drop=True)
        self._group.break_connection()

    def close(self) -> None:
        self._outgoing.fail(ChannelClosed("this side closed the channel"))  # then the thread says goodbye
        self._threads[0].join(DRAIN_TIMEOUT_S)
        self.abort()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def gone(self) -> ChannelError | None:
        """Why there is nobody to talk to, if so."""
        return self._outgoing.error

    def _send_all(self) -> None:
        header = torch.tensor([_MAGIC, 0], dtype=torch.int64)
        try:
            while True:
                num_bytes = self._outgoing.wait_filled(_FOR_EVER, "")
                header[1] = num_bytes
                self._group.send(header, self._send_buffers[self._outgoing.emptying, :num_bytes])
                self._outgoing.emptied()
        except ChannelError:
            if not self._is_ended.is_set():
                self._say_goodbye(header)
        except RuntimeError as error:
            self._fail(_connection_lost(error))

    def _say_goodbye(self, header: torch.Tensor) -> None:
        header[1] = _GOODBYE
        try:
            self._group.send(header, None)
        except RuntimeError:
            return  # the peer is gone already

    def _receive_all(self) -> None:
        header = torch.empty(2, dtype=torch.int64)
        try:
            while True:
                self._group.receive_header(header)
                magic, num_bytes = header.tolist()
                if magic == _MAGIC and num_bytes == _GOODBYE:
                    raise ChannelClosed("the peer closed the channel")
                if magic != _MAGIC or not 0 < num_bytes <= self.max_receive_bytes:
                    raise ChannelCorrupted(f"a header of {magic:#x} and {num_bytes} bytes is none of this channel")
                self._incoming.wait_free(_FOR_EVER, "")
                self._group.receive_payload(self._receive_buffers[self._incoming.filling, :num_bytes])
                self._incoming.filled(num_bytes)
        except ChannelError as error:
            self._fail(error)
        except RuntimeError as error:
            self._fail(_connection_lost(error))

    def _fail(self, error: ChannelError) -> None:
        self._outgoing.fail(error, drop=True)
        self._incoming.fail(error)


def _connection_lost(error: RuntimeError) -> PeerDied:
    return PeerDied(f"the connection to the peer ended: {str(error).partition(chr(10))[0][:200]}")
