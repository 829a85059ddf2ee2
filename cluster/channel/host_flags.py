"""Words of host memory that several processes and their GPUs see, for streams to write and to wait for."""

import mmap
import os
from contextlib import ExitStack
from typing import Final

from cluster.channel import cuda_driver
from cluster.channel.segment import SharedSegment, creator_of, open_descriptor, unlink

_LINE_BYTES: Final = 128
"""Each flag has cache lines of its own."""


class HostFlags:
    """One word of 32 bits a line of a shared page, by number from 0; all are 0 at first. Raises RuntimeError where the
    GPU can't have the page."""

    def __init__(self, segment: SharedSegment) -> None:
        self.segment = segment
        with ExitStack() as held:
            held.callback(segment.close)
            self._mapped = cuda_driver.register_host_memory(segment.address(0), mmap.PAGESIZE)
            held.pop_all()

    @classmethod
    def create(cls) -> "HostFlags":
        """Under a name, until `unlink`. Raises ChannelUnavailable where /dev/shm has no room."""
        segment = SharedSegment.create(mmap.PAGESIZE)
        with ExitStack() as held:
            held.callback(unlink, segment.name)
            flags = cls(segment)
            held.pop_all()
        return flags

    @classmethod
    def open(cls, name: str) -> "HostFlags":
        """Another process's. Raises ChannelUnavailable where there is none of that name, or not for this process."""
        creator_of(name)  # or it is no name of ours
        descriptor = open_descriptor(name)
        try:
            return cls(SharedSegment.open(name, descriptor))
        finally:
            os.close(descriptor)

    def address(self, flag: int) -> int:
        """For a stream of the current GPU."""
        return self._mapped + flag * _LINE_BYTES

    def read(self, flag: int) -> int:
        return self.segment.words[flag * _LINE_BYTES // 4]

    def write(self, flag: int, value: int) -> None:
        self.segment.words[flag * _LINE_BYTES // 4] = value

    def unlink(self) -> None:
        """When all have it. Any of them may, and more than one."""
        unlink(self.segment.name)

    def close(self) -> None:
        """When no stream of this process will touch them."""
        cuda_driver.unregister_host_memory(self.segment.address(0))
        self.segment.close()
