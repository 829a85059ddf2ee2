"""Which process is at the other end, and whether it still lives."""

import os
import select
from dataclasses import dataclass
from pathlib import Path

from cluster.channel.errors import ChannelUnavailable


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process for good: its id may be given to another, but not with the same start."""

    pid: int
    start_ticks: int
    """Since boot, from /proc."""

    @classmethod
    def current(cls) -> "ProcessIdentity":
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Raises ProcessLookupError where there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except FileNotFoundError:
            raise ProcessLookupError(f"no process {pid}") from None
        # "pid (name) state ppid ...": the name may hold anything; the start is field 22, the state field 3.
        state, *fields = stat[stat.rindex(b")") + 2 :].split()
        if state in (b"Z", b"X"):
            raise ProcessLookupError(f"process {pid} has ended")
        return cls(pid, int(fields[18]))

    def exists(self) -> bool:
        try:
            return ProcessIdentity.of(self.pid) == self
        except ProcessLookupError:
            return False


def pid_namespace() -> int:
    """Two processes that see the same number here mean the same by a process id."""
    return Path("/proc/self/ns/pid").stat().st_ino


class ProcessWatch:
    """Asks the kernel in about a microsecond whether a process has ended. Holds a file descriptor."""

    def __init__(self, process: ProcessIdentity) -> None:
        """
        Raises:
            ProcessLookupError: it has ended already.
            ChannelUnavailable: it can't be watched.
        """
        self.process = process
        try:
            self._fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise ChannelUnavailable(
                f"process {process.pid} can't be watched",
                f"pidfd_open answers {error.strerror}; it needs Linux 5.3, and a sandbox that allows it",
                "use the gloo channel",
            ) from None
        if not process.exists():  # asked after the open: from here on the id can't be another's
            os.close(self._fd)
            raise ProcessLookupError(f"process {process.pid} has ended")
        self.is_open = True

    def has_ended(self, within_s: float = 0.0) -> bool:
        """From any thread. Waits for the end for so long."""
        poll = select.poll()  # a new one: two threads may not be in one poll at a time
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(1e3 * within_s))

    def close(self) -> None:
        self.is_open = False
        os.close(self._fd)
