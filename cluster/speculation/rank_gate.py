"""Where the streams of an engine's further tensor-parallel ranks wait until the first one's has its drafts.

They wait for a word of host memory. The collective operation that comes next would do as well, but waits in a kernel,
and the draft may be on that rank's GPU, where kernels of two processes take turns.
"""

from cluster.channel import cuda_driver
from cluster.channel.device import word_of
from cluster.channel.gpu import current_stream
from cluster.channel.host_flags import HostFlags

_FLAG = 0


class RankGate:
    """Each rank has one on the same flags, and enters as often as the others."""

    def __init__(self, flags: HostFlags, *, is_first: bool) -> None:
        self._flags = flags
        self._is_first = is_first
        self._entered = 0

    @classmethod
    def first(cls) -> "RankGate":
        """Of the rank that opens it."""
        return cls(HostFlags.create(), is_first=True)

    @classmethod
    def further(cls, name: str) -> "RankGate":
        return cls(HostFlags.open(name), is_first=False)

    @property
    def name(self) -> str:
        return self._flags.segment.name

    def unlink(self) -> None:
        """When all ranks have it. Any of them may, and more than one."""
        self._flags.unlink()

    def close(self) -> None:
        """When this rank's stream has passed it for the last time."""
        self._flags.close()

    def enter(self) -> None:
        """Put on the current stream: at the first rank's that the gate is open, at another's to wait for it."""
        self._entered += 1
        put = cuda_driver.stream_write if self._is_first else cuda_driver.stream_wait
        put(current_stream(), self._flags.address(_FLAG), word_of(self._entered))
