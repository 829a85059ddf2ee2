"""What channels between GPUs have in common: this process's GPU, and a channel between CPUs that goes beside."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from cluster.channel.device import DeviceChannel
from cluster.channel.errors import ChannelError, ChannelUnavailable

if TYPE_CHECKING:
    from cluster.channel.collective import GlooChannel
    from cluster.channel.shm import ShmChannel

UNUSED_BYTES: Final = 1
"""The draft sends no messages; the channel beside has room for one all the same."""


class GpuChannel(DeviceChannel):
    """`send` and `recv` are for what goes beside, and its peer's end is what tells of a loss."""

    def __init__(self, beside: "ShmChannel | GlooChannel") -> None:
        self._beside = beside
        self._is_closed = False
        self.max_send_bytes = beside.max_send_bytes
        self.max_receive_bytes = beside.max_receive_bytes

    def send(self, parts: Sequence[memoryview], deadline_s: float) -> int:
        return self._beside.send(parts, deadline_s)

    def recv(self, into: memoryview, deadline_s: float) -> int:
        return self._beside.recv(into, deadline_s)

    def abort(self) -> None:
        self._beside.abort()

    def gone(self) -> ChannelError | None:
        return self._beside.gone()

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def current_gpu(kind: str, otherwise: str) -> int:
    """Its number here. Raises ChannelUnavailable where there is none; `otherwise` is a channel to take then."""
    if not torch.cuda.is_available():
        raise ChannelUnavailable(f"the {kind} channel", "this process has no GPU", f"use the {otherwise} channel")
    device: int = torch.cuda.current_device()
    return device


def uuid_of(device: int) -> str:
    """The same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def current_stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream
