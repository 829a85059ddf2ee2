"""What another process will have done soon."""

import time
from collections.abc import Callable


def eventually(holds: Callable[[], bool], *, deadline_s: float, otherwise: str = "it never came to hold") -> None:
    """Ask again and again; fails if it doesn't hold within `deadline_s` seconds."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.02)
