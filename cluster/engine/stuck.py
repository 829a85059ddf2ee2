"""The end of a process that waits for what can't come: nothing else ends a kernel that waits for another GPU's."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

log = logging.getLogger(__name__)


def end_if_stuck(wait: Callable[[], None], timeout_s: float) -> None:
    """End this process, with exit code 1, if `wait` neither returns nor raises RuntimeError in time."""

    def waiting() -> None:
        with suppress(RuntimeError):
            wait()

    thread = threading.Thread(target=waiting, name="dspark-stuck", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        end_stuck()


def end_stuck() -> NoReturn:
    """At once, with exit code 1."""
    log.error("what this process waits for on its device can't come any more: it ends, too")
    os._exit(1)
