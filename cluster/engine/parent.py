"""vLLM's engine runs in a process of its own, which outlives one that is killed: here it doesn't."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_VARIABLE: Final = "DSPARK_PARENT"
_PR_SET_PDEATHSIG: Final = 1


@contextmanager
def children_die_with_this_process() -> Iterator[None]:
    """Of the processes that vLLM starts within the block. The thread that starts them must live as long as they shall:
    Linux takes its end for the parent's."""
    os.environ[_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def follow_parent() -> None:
    """In a process that vLLM has started: be killed when the process that asked for it ends."""
    parent = os.environ.get(_VARIABLE)
    if parent is None or os.getppid() != int(parent):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
