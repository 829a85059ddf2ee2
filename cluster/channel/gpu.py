"""The GPU of this process, for channels that need one."""

import torch

from cluster.channel.errors import ChannelUnavailable


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
