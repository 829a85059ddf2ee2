"""A piece of memory that two processes share, under a name that says whose it is.

Not `multiprocessing.shared_memory`: its resource tracker unlinks at exit what another process still uses, and
complains. POSIX shared memory on Linux is a file in /dev/shm, so files are what this module works with.
"""

import ctypes
import errno
import mmap
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from cluster.channel.errors import ChannelUnavailable
from cluster.channel.process import ProcessIdentity, ProcessWatch, pid_namespace

DIRECTORY: Final = Path("/dev/shm")
_CHANNEL: Final = "dspark-cluster"
ENGINE: Final = "dspark-engine"
"""The memory in which vLLM's processes talk to each other."""
_OWNED: Final = r"\.(\d{1,20})\.(\d{1,10})\.(\d{1,20})\.[0-9a-f]{16}"
_NAME: Final = re.compile(_CHANNEL + _OWNED, re.ASCII)
_ANY_NAME: Final = re.compile(f"(?:{_CHANNEL}|{ENGINE}){_OWNED}(?:-.*)?", re.ASCII)
"""vLLM puts more behind the name that a group of ranks is given."""


class SharedSegment:
    """Mapped for as long as it is open. `memory` is its bytes, `words` the same as 4-byte numbers."""

    def __init__(self, name: str, descriptor: int, num_bytes: int) -> None:
        self.name = name
        # Populated: a round must not stop for page faults.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(descriptor, num_bytes, flags=flags)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = memoryview(self._map)
        self.words = self.memory.cast("I")

    @classmethod
    def create(cls, num_bytes: int) -> "SharedSegment":
        """Zeroed memory. Raises ChannelUnavailable where /dev/shm has no room for it."""
        name = new_name(_CHANNEL)
        try:
            descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_segment(name, error.strerror) from None
        try:
            # Not ftruncate: a full /dev/shm would then kill the process at its first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(name, descriptor, num_bytes)
        except OSError as error:
            unlink(name)
            if error.errno != errno.ENOSPC:
                raise
            raise ChannelUnavailable(
                f"a channel of {num_bytes} bytes",
                f"{DIRECTORY} has {_free_bytes()} bytes left",
                "give the container more shared memory (--shm-size), or use the gloo channel",
            ) from None
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, name: str, descriptor: int) -> "SharedSegment":
        _require_own(name, descriptor)
        return cls(name, descriptor, os.fstat(descriptor).st_size)

    def address(self, offset: int) -> int:
        return self._base + offset

    def close(self) -> None:
        """The memory stays for as long as the other side has it."""
        self.words.release()
        self.memory.release()
        self._map.close()


def new_name(prefix: str) -> str:
    """One of this process's."""
    process = ProcessIdentity.current()
    return f"{prefix}.{pid_namespace()}.{process.pid}.{process.start_ticks}.{secrets.token_hex(8)}"


def open_descriptor(name: str) -> int:
    try:
        return os.open(DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _no_segment(name, error.strerror) from None


def creator_of(name: str) -> ProcessIdentity:
    """Raises ChannelUnavailable where the name isn't one of ours, or of another PID namespace."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise _no_segment(name, "this is not the name of a channel")
    namespace, pid, start_ticks = map(int, match.groups())
    if namespace != pid_namespace():
        raise ChannelUnavailable(
            f"the channel {name}",
            "its process is in another PID namespace, where neither side could see the other die",
            "share the PID namespace between the two containers, or use the gloo channel",
        )
    return ProcessIdentity(pid, start_ticks)


def require_shared(name: str) -> None:
    """That this process can have the segment for as long as its creator lives. Where that has ended, nobody can tell.

    Raises ChannelUnavailable: the two share no PID namespace, no /dev/shm or no user.
    """
    creator = creator_of(name)
    try:
        ProcessWatch(creator).close()
    except ProcessLookupError:
        return
    try:
        descriptor = open_descriptor(name)
    except ChannelUnavailable as error:
        why = f"process {creator.pid} has made it, and here it can't be opened ({error.why})"
        raise _not_shared(name, why) from error
    try:
        _require_own(name, descriptor)
    finally:
        os.close(descriptor)


def unlink(name: str) -> None:
    (DIRECTORY / name).unlink(missing_ok=True)


def unlink_group(name: str) -> None:
    """The segments that vLLM's CPU ranks have named after their group: they unlink them only at some of their ends."""
    for path in DIRECTORY.glob(f"{name}-*"):
        path.unlink(missing_ok=True)


def segments_of(processes: Collection[ProcessIdentity]) -> list[Path]:
    """Those that these processes have made, in this PID namespace, and that still have a name."""
    return [path for path, owner in _named() if owner in processes]


def remove_orphans() -> None:
    """Unlink the segments of this user and PID namespace whose processes died without: a channel's before anybody
    opened it, an engine's when it was killed."""
    for path, owner in _named():
        if owner.exists():
            continue
        try:
            path.unlink(missing_ok=True)
        except PermissionError:
            continue  # another user's; /dev/shm is sticky


def _named() -> Iterator[tuple[Path, ProcessIdentity]]:
    """The segments of this PID namespace, and whose they are."""
    for path in DIRECTORY.glob("dspark-*"):
        match = _ANY_NAME.fullmatch(path.name)
        if match is None:
            continue
        namespace, pid, start_ticks = map(int, match.groups())
        if namespace == pid_namespace():
            yield path, ProcessIdentity(pid, start_ticks)


def _require_own(name: str, descriptor: int) -> None:
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        raise _not_shared(name, f"it belongs to user {owner}, this process to {os.geteuid()}")


def _free_bytes() -> int:
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def _no_segment(name: str, why: str | None) -> ChannelUnavailable:
    return ChannelUnavailable(
        f"the shared memory {name}", why or "it can't be opened", "offer a new channel, or use the gloo channel"
    )


def _not_shared(name: str, why: str) -> ChannelUnavailable:
    return ChannelUnavailable(
        f"the shared memory {name}", why, f"run both sides as one user with one {DIRECTORY}, or use the gloo channel"
    )
