"""Sleep until another process changes a word of shared memory: Linux's futex, which neither Python nor glibc wraps.

Waiting costs no CPU time, waking one system call. Python has no memory fences, so the order of stores is argued here:

* x86-64 keeps a process's stores in order, and its loads (TSO). A word that is stored after a payload is seen after
  it. The one reordering that TSO allows, a load before an earlier store, is the lost wake-up: the kernel rules it out
  by comparing the word again, under a lock and behind a full barrier, before it lets a waiter sleep.
* aarch64 orders neither. `fence` between payload and word, on both sides, does: a futex wake of a word that nobody
  waits for passes the full barrier (`smp_mb`) with which the kernel orders the caller's stores before its look at
  the waiters.
* One store is one store: an aligned 4-byte item of a `memoryview` is copied with its size known at compile time, which
  compilers turn into a single move.
"""

import ctypes
import errno
import math
import os
import platform
import sys
import time
from typing import Final

from cluster.channel.errors import ChannelUnavailable

# From the kernel's tables; any other architecture would need its own fence, too.
_IS_X86: Final = platform.machine() == "x86_64"
_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None

_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_EVERYBODY: Final = 2**31 - 1

# Where a sandbox refuses the call: short enough for a round of milliseconds, long enough to cost 1 % of a core.
_NAP_S: Final = 0.0005


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_syscall: Final = _libc.syscall
_syscall.restype = ctypes.c_long

_nobody_waits: Final = ctypes.c_uint32(0)
_NOBODY_WAITS: Final = ctypes.addressof(_nobody_waits)


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the word at `address` is `value`, `timeout_s` at most, perhaps less: look again afterwards."""
    if not _HAS_FUTEX:
        time.sleep(min(timeout_s, _NAP_S))
        return
    fraction, seconds = math.modf(timeout_s)
    timespec = _Timespec(int(seconds), int(fraction * 1e9))
    if _futex(address, _FUTEX_WAIT, value, ctypes.byref(timespec)) == 0:
        return
    error = ctypes.get_errno()
    if error not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(error, f"futex wait: {os.strerror(error)}")


def wake(address: int) -> None:
    """Wake everybody who waits for the word at `address`, in any process."""
    _futex(address, _FUTEX_WAKE, _EVERYBODY, None)


def fence() -> None:
    """Loads and stores before it are done before those after it."""
    if not _IS_X86:
        _futex(_NOBODY_WAITS, _FUTEX_WAKE, 1, None)


def require_ordered_memory() -> None:
    """Raises ChannelUnavailable where two processes can't rely on the order of each other's stores."""
    if _IS_X86 or _HAS_FUTEX:
        return
    raise ChannelUnavailable(
        f"shared memory between processes on {platform.machine()}",
        "it needs Linux on x86-64, or on aarch64 with the futex system call",
        "use the gloo channel",
    )


def _futex(address: int, operation: int, value: int, timeout: object) -> int:
    return int(
        _syscall(
            ctypes.c_long(_SYS_FUTEX or 0),
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            ctypes.c_void_p(None),
            ctypes.c_uint32(0),
        )
    )


_HAS_FUTEX: Final = _SYS_FUTEX is not None and _futex(_NOBODY_WAITS, _FUTEX_WAKE, 1, None) >= 0
