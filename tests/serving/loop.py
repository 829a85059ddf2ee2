"""An event loop in a thread: servers run there while a test, in the main thread, is their client."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

DEADLINE_S = 300
"""For one thing asked of the loop; an engine takes a minute to start on a busy machine."""

T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for what the coroutine returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)
