"""What comes back by itself, on a machine that does other things."""

import time
from collections.abc import Callable
from typing import Final

from cluster.errors import UserError

_POLL_S: Final = 0.02


def wait_until(holds: Callable[[], bool], what: str, *, timeout_s: float, remedy: str) -> float:
    """When it came to hold, by `time.monotonic()`.

    Raises:
        UserError: it didn't, within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise UserError(what, f"it hasn't come in {timeout_s:g} s", remedy)
        time.sleep(_POLL_S)
    return time.monotonic()
