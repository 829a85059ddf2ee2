"""The device channel between two processes with a GPU each, of one host or of two: NCCL carries request and reply.

Each side has its own buffers, so the end of the peer takes nothing away from under a stream. The target's main stream
never waits in NCCL, where only an abort would end it, which takes 0.2 s: the transfers are on a side stream, behind an
event, and set REPLY when they are through; the main stream waits for that word of host memory alone, which the CPU can
set, too. The draft has nothing else to do, and receives and sends on its main stream.

What the CPU knows goes beside, through shm on one host, and gloo between two. That peer's end is what tells of a loss.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cluster.channel import cuda_driver, nccl_library
from cluster.channel.base import LOOPBACK, ChannelAddress, ChannelOffer
from cluster.channel.collective import GlooChannel, GlooOffer
from cluster.channel.device import ANSWERED_OFFSET
from cluster.channel.errors import ChannelCorrupted, ChannelUnavailable
from cluster.channel.gpu import UNUSED_BYTES, GpuChannel, current_gpu, current_stream, uuid_of
from cluster.channel.nccl_group import NcclGroup
from cluster.channel.shm import ShmChannel, ShmOffer
from cluster.contract.codec import from_plain, parse, to_plain, to_text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """What the draft's side needs, as text within a ChannelAddress."""

    gpu: str
    """The UUID of the target's."""
    beside: ChannelAddress


class NcclOffer(ChannelOffer):
    def __init__(
        self, *, max_send_bytes: int, max_receive_bytes: int, max_notice_bytes: int, num_slots: int, host: str
    ) -> None:
        """The target's side, on the current GPU. The first two are the buffers' sizes; `host` is this host's address,
        as the draft's reaches it: where that is the loopback's, the two share a host.

        Raises ChannelUnavailable where there is no GPU, no NCCL, or no channel to go beside.
        """
        gpu = uuid_of(current_gpu("nccl", otherwise="gloo"))
        nccl_library.require()
        sizes = {
            "max_send_bytes": max(max_notice_bytes, nccl_library.UNIQUE_ID_BYTES),
            "max_receive_bytes": UNUSED_BYTES,
            "num_slots": num_slots,
        }
        self._beside = ShmOffer(**sizes) if host == LOOPBACK else GlooOffer(**sizes, host=host)
        location = _Location(gpu=gpu, beside=self._beside.address)
        self.address = ChannelAddress(
            kind="nccl",
            location=to_text(to_plain(location)),
            num_slots=num_slots,
            max_bytes_from_offerer=max_send_bytes,
            max_bytes_from_opener=max_receive_bytes,
        )

    def accept(self, deadline_s: float) -> "NcclChannel":
        beside = self._beside.accept(deadline_s)
        with _closing(beside):
            unique_id = nccl_library.unique_id()
            beside.send([memoryview(unique_id)], deadline_s)
            return _joined(beside, unique_id, 0, self.address, deadline_s)

    def withdraw(self) -> None:
        self._beside.withdraw()


class NcclChannel(GpuChannel):
    def __init__(self, beside: ShmChannel | GlooChannel, group: NcclGroup, address: ChannelAddress) -> None:
        super().__init__(beside)
        self._group = group
        with ExitStack() as held:
            self.request_address = _allocated(address.max_bytes_from_offerer, held)
            self.reply_address = _allocated(address.max_bytes_from_opener, held)
            self._stream = cuda_driver.create_stream()
            held.callback(cuda_driver.destroy_stream, self._stream)
            self._side = torch.cuda.ExternalStream(self._stream)
            self._written = torch.cuda.Event()
            # Page-locked, so the GPU has it under the same address.
            self._reply_word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self._reply_view = self._reply_word.numpy().view(np.uint32)
            self._request_word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self._request_view = self._request_word.numpy().view(np.uint32)
            self._held = held.pop_all()

    @staticmethod
    def check(address: ChannelAddress) -> None:
        """Raises ChannelUnavailable where the current GPU can't be NCCL's second beside the target's, or the two
        processes of one host share no memory of it."""
        location, gpu = _location(address), uuid_of(current_gpu("nccl", otherwise="gloo"))
        nccl_library.require()
        if gpu == location.gpu:
            raise ChannelUnavailable(
                "the nccl channel",
                f"target and draft share GPU {gpu}, and NCCL refuses two ranks on one GPU",
                "give the draft a GPU of its own, or use the cuda_ipc channel",
            )
        if location.beside.kind == "shm":
            ShmChannel.check(location.beside)

    @staticmethod
    def open(address: ChannelAddress, deadline_s: float, *, host: str) -> "NcclChannel":
        """The draft's side, on the current GPU.

        Raises:
            ChannelUnavailable: the offer is gone, or this GPU can't be had for it.
            ChannelError: the target has stopped halfway.
        """
        NcclChannel.check(address)
        offered = _location(address).beside
        beside = ShmChannel.open(offered) if offered.kind == "shm" else GlooChannel.open(offered, deadline_s, host=host)
        with _closing(beside):
            unique_id = bytearray(beside.max_receive_bytes)
            num_bytes = beside.recv(memoryview(unique_id), deadline_s)
            if num_bytes != nccl_library.UNIQUE_ID_BYTES:
                raise ChannelCorrupted(f"{num_bytes} bytes are no id of an NCCL group")
            return _joined(beside, bytes(unique_id[:num_bytes]), 1, address, deadline_s)

    def abort(self) -> None:
        super().abort()
        self._group.abort()

    def close(self) -> None:
        """What a transfer that doesn't end may touch is left to the end of the process."""
        if self._is_closed:
            return
        self._is_closed = True
        has_ended = self._group.close()
        self._beside.close()
        if has_ended:
            self._held.close()

    def request(self, step: int, num_bytes: int, reply_bytes: int) -> None:
        self._written.record()
        self._side.wait_event(self._written)
        self._group.send(self.request_address, num_bytes, self._stream)
        self._group.receive(self.reply_address, reply_bytes, self._stream)
        cuda_driver.stream_write(self._stream, self._reply_word.data_ptr(), step)
        # Not on the side stream, where the transfer would wait for it.
        cuda_driver.stream_write(current_stream(), self._request_word.data_ptr(), step)

    def await_request(self, step: int, num_bytes: int) -> None:  # noqa: ARG002 - they come in order
        self._group.receive(self.request_address, num_bytes, current_stream())

    def reply(self, step: int, num_bytes: int) -> None:
        stream = current_stream()
        cuda_driver.stream_write(stream, self.reply_address + ANSWERED_OFFSET, step)
        self._group.send(self.reply_address, num_bytes, stream)

    def await_reply(self, step: int) -> None:
        cuda_driver.stream_wait(current_stream(), self._reply_word.data_ptr(), step)

    @property
    def requested(self) -> int:
        return int(self._request_view[0])

    @property
    def replied(self) -> int:
        return int(self._reply_view[0])

    def release(self, step: int) -> None:
        self._reply_view[0] = step
        self._group.abort()  # or the side stream would wait for ever, and whatever waits for the whole device with it


def _joined(
    beside: ShmChannel | GlooChannel, unique_id: bytes, rank: int, address: ChannelAddress, deadline_s: float
) -> NcclChannel:
    group = NcclGroup(unique_id, rank, deadline_s)
    with ExitStack() as held:
        held.callback(group.abort)
        channel = NcclChannel(beside, group, address)
        held.pop_all()
    return channel


def _allocated(num_bytes: int, held: ExitStack) -> int:
    address = cuda_driver.allocate(num_bytes)
    held.callback(cuda_driver.free, address)
    return address


@contextmanager
def _closing(beside: ShmChannel | GlooChannel) -> Iterator[None]:
    """Where the whole doesn't open, neither does this part. A failure of CUDA or NCCL is the user's to know."""
    with ExitStack() as held:
        held.callback(beside.close)
        try:
            yield
        except RuntimeError as error:
            raise ChannelUnavailable("the nccl channel", str(error), "use the gloo channel") from error
        held.pop_all()


def _location(address: ChannelAddress) -> _Location:
    return from_plain(_Location, parse(address.location))
