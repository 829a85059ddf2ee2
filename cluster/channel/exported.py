"""Memory of one process that another one of this host reads: the target's KV pool, mapped by its draft.

It has no name in the file system: the reader opens it through the writer's own descriptor. So a draft that starts again
can map it again, the kernel frees it with the last of the two processes, and no limit of /dev/shm counts.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.channel.errors import ChannelUnavailable
from cluster.channel.process import ProcessIdentity, pid_namespace
from cluster.contract.codec import from_plain, parse, to_plain, to_text
from cluster.contract.errors import DocumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    namespace: int
    pid: int
    start_ticks: int
    descriptor: int


class ExportedMemory:
    """Zeroed memory of this process; `location` is for the peer. Lives as long as this object and all views of it."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("dspark-cluster-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = mmap.mmap(self._descriptor, num_bytes)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        me = ProcessIdentity.current()
        location = _Location(
            namespace=pid_namespace(), pid=me.pid, start_ticks=me.start_ticks, descriptor=self._descriptor
        )
        self.location = to_text(to_plain(location))

    def close(self) -> None:
        """No peer can map it any more. Those that have, and this process's own views, keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class MappedMemory:
    """The peer's memory, to read only: a write ends this process, whatever its code takes the memory for."""

    def __init__(self, location: str, num_bytes: int) -> None:
        """
        Raises:
            ChannelUnavailable: this process can't map it, or it has another size.
        """
        found = _read_location(location)
        try:
            descriptor = os.open(f"/proc/{found.pid}/fd/{found.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(error.strerror) from None
        try:
            size = os.fstat(descriptor).st_size
            if size != num_bytes:
                raise _unusable(f"it has {size} bytes, {num_bytes} were announced")
            self._map = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        # Whoever wants a tensor wants a buffer that can be written, and this one can't.
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        view: Callable[[int], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * num_bytes).from_address
        self.memory = view(address)
        """Valid as long as this object."""


def _read_location(location: str) -> _Location:
    try:
        found = from_plain(_Location, parse(location))
    except DocumentError as error:
        raise _unusable(f"{location!r} is no location: {error}") from None
    if found.namespace != pid_namespace():
        raise _unusable("its process is in another PID namespace")
    if not ProcessIdentity(found.pid, found.start_ticks).exists():
        raise _unusable("its process has ended")
    return found


def _unusable(why: str | None) -> ChannelUnavailable:
    return ChannelUnavailable(
        "the target's KV pool",
        f"it can't be mapped: {why}",
        "run both processes as one user in one PID namespace, or let the draft keep a copy (kv_sharing: mirror)",
    )
