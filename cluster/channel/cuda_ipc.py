"""The device channel between two processes of one host: on one GPU, or on two of which one reaches the other's memory.

Whatever the target's stream touches is the target's own: the buffers, in its GPU's memory, and the flags, in a page of
shared memory that both GPUs have mapped. So the end of a draft takes nothing away from under it. Nor does the target
take the buffers away from under a draft: it frees them when the draft's process has ended.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch

from cluster.channel import cuda_driver
from cluster.channel.base import ChannelAddress, ChannelOffer
from cluster.channel.device import ANSWERED_OFFSET
from cluster.channel.errors import ChannelUnavailable
from cluster.channel.gpu import UNUSED_BYTES, GpuChannel, current_gpu, current_stream, uuid_of
from cluster.channel.host_flags import HostFlags
from cluster.channel.segment import require_shared
from cluster.channel.shm import ShmChannel, ShmOffer
from cluster.contract.codec import from_plain, parse, to_plain, to_text

log = logging.getLogger(__name__)

DRAFT_END_TIMEOUT_S: Final = 5.0
"""For the draft's process to end, as it does by itself when its channel is closed. With a GPU's memory to give back it
takes a second or two."""

_ALIGNMENT: Final = 256


class _Flag(IntEnum):
    """Words of 32 bits, each set to a round's step."""

    REQUEST = 0
    REPLY = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """What the draft's side needs, as text within a ChannelAddress."""

    gpu: str
    """The UUID of the GPU with the buffers."""
    handle: str
    """Of both buffers, in hexadecimal."""
    flags: str
    """The segment's name."""
    ring: ChannelAddress
    """For what goes beside."""


class CudaIpcOffer(ChannelOffer):
    def __init__(self, *, max_send_bytes: int, max_receive_bytes: int, max_notice_bytes: int, num_slots: int) -> None:
        """The target's side, on the current GPU. The first two are the buffers' sizes.

        Raises ChannelUnavailable where there is no GPU, or shared memory can't be had.
        """
        gpu = uuid_of(current_gpu("cuda_ipc", otherwise="shm"))
        with ExitStack() as held:
            try:
                self._flags = HostFlags.create()
                held.callback(self._flags.close)
                held.callback(self._flags.unlink)
                self._buffers = _Buffers(max_send_bytes, max_receive_bytes)
                held.callback(self._buffers.free)
                handle = cuda_driver.export(self._buffers.address).hex()
            except RuntimeError as error:
                raise ChannelUnavailable("the cuda_ipc channel", str(error), "use the shm channel") from error
            self._ring = ShmOffer(max_send_bytes=max_notice_bytes, max_receive_bytes=UNUSED_BYTES, num_slots=num_slots)
            held.callback(self._ring.withdraw)  # the first to go: a draft opens it last
            self._held = held.pop_all()
        location = _Location(gpu=gpu, handle=handle, flags=self._flags.segment.name, ring=self._ring.address)
        self.address = ChannelAddress(
            kind="cuda_ipc",
            location=to_text(to_plain(location)),
            num_slots=num_slots,
            max_bytes_from_offerer=max_send_bytes,
            max_bytes_from_opener=max_receive_bytes,
        )

    def accept(self, deadline_s: float) -> "CudaIpcChannel":
        ring = self._ring.accept(deadline_s)
        self._held.pop_all()  # it is the channel's now
        self._flags.unlink()
        return CudaIpcChannel(ring, self._flags, self._buffers)

    def withdraw(self) -> None:
        self._held.close()


class CudaIpcChannel(GpuChannel):
    def __init__(self, ring: ShmChannel, flags: HostFlags, buffers: "_Buffers") -> None:
        super().__init__(ring)
        self._ring = ring
        self._flags = flags
        self._buffers = buffers
        self.request_address = buffers.address
        self.reply_address = buffers.address + buffers.reply_offset

    @staticmethod
    def check(address: ChannelAddress) -> None:
        """Raises ChannelUnavailable where the current GPU doesn't reach the target's, or the two processes share no
        memory of the host."""
        location = _location(address)
        _require_reachable(location.gpu)
        ShmChannel.check(location.ring)
        require_shared(location.flags)

    @classmethod
    def open(cls, address: ChannelAddress) -> "CudaIpcChannel":
        """The draft's side, on the current GPU.

        Raises ChannelUnavailable where the target's memory can't be opened, or the offer is gone.
        """
        location = _location(address)
        with ExitStack() as held:
            try:
                flags = HostFlags.open(location.flags)
                held.callback(flags.close)
                sizes = address.max_bytes_from_offerer, address.max_bytes_from_opener
                buffers = _Buffers(*sizes, handle=location.handle)
                held.callback(cuda_driver.close_exported, buffers.address)
            except RuntimeError as error:
                raise _unreachable(
                    location.gpu, str(error), "use the shm channel, which goes through the CPU"
                ) from error
            ring = ShmChannel.open(location.ring)  # last: the target takes it for the whole
            held.pop_all()
        return cls(ring, flags, buffers)

    def close(self) -> None:
        """The target calls it when its stream has passed all rounds. The draft's stream may have one before it still,
        which reads and writes the buffers: they stay where its process lives on, as one that is stopped does.

        That stream may also wait for a target that is gone, and would hold up a draft that gives anything back: its
        process does that, when it ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._ring.abort()
        if self._buffers.is_own:
            if self._ring.await_peer_end(DRAFT_END_TIMEOUT_S):
                self._buffers.free()
            else:
                log.warning(
                    "the draft's process hasn't ended in %.0f s, and may still write to this GPU's memory: "
                    "the %d bytes of its rounds stay until this process ends",
                    DRAFT_END_TIMEOUT_S,
                    self._buffers.num_bytes,
                )
            self._flags.close()
        self._ring.close()

    def request(self, step: int, num_bytes: int, reply_bytes: int) -> None:  # noqa: ARG002 - it is read where it lies
        self._write(_Flag.REQUEST, step)

    def await_request(self, step: int, num_bytes: int) -> None:  # noqa: ARG002
        self._wait(_Flag.REQUEST, step)

    def reply(self, step: int, num_bytes: int) -> None:  # noqa: ARG002
        cuda_driver.stream_write(current_stream(), self.reply_address + ANSWERED_OFFSET, step)
        self._write(_Flag.REPLY, step)

    def await_reply(self, step: int) -> None:
        self._wait(_Flag.REPLY, step)

    @property
    def requested(self) -> int:
        return self._flags.read(_Flag.REQUEST)

    @property
    def replied(self) -> int:
        return self._flags.read(_Flag.REPLY)

    def release(self, step: int) -> None:
        if not self._is_closed:  # then no stream waits, and the flags may be gone
            self._flags.write(_Flag.REPLY, step)

    def _write(self, flag: _Flag, step: int) -> None:
        cuda_driver.stream_write(current_stream(), self._flags.address(flag), step)

    def _wait(self, flag: _Flag, step: int) -> None:
        cuda_driver.stream_wait(current_stream(), self._flags.address(flag), step)


class _Buffers:
    """Request and reply, one behind the other, in the target's GPU memory."""

    def __init__(self, request_bytes: int, reply_bytes: int, *, handle: str | None = None) -> None:
        """The target's own, without a handle. Raises RuntimeError where they can't be had."""
        self.reply_offset = -(-request_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = self.reply_offset + reply_bytes
        self.is_own = handle is None
        self.address = (
            cuda_driver.allocate(self.num_bytes) if handle is None else cuda_driver.open_exported(bytes.fromhex(handle))
        )

    def free(self) -> None:
        """Their owner does, when no other process has them."""
        cuda_driver.free(self.address)


def _location(address: ChannelAddress) -> _Location:
    return from_plain(_Location, parse(address.location))


def _require_reachable(gpu: str) -> None:
    """That this process's GPU is that one, or can read and write its memory."""
    own = current_gpu("cuda_ipc", otherwise="shm")
    if uuid_of(own) == gpu:
        return
    there = [device for device in range(torch.cuda.device_count()) if uuid_of(device) == gpu]
    if not there:
        why = "this process doesn't see that GPU: CUDA_VISIBLE_DEVICES must name both"
        raise _unreachable(gpu, why, "or use the nccl channel, which doesn't need it")
    if not torch.cuda.can_device_access_peer(own, there[0]):
        raise _unreachable(gpu, f"GPU {uuid_of(own)} has no peer access to it", "use the nccl channel")


def _unreachable(gpu: str, why: str, remedy: str) -> ChannelUnavailable:
    return ChannelUnavailable(f"the target's memory on GPU {gpu}", why, remedy)
