"""How a target gets a draft again: beside its steps, in a thread that tries until there is one."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from cluster.contract.errors import ContractViolation
from cluster.errors import UserError

log = logging.getLogger(__name__)

Draft = TypeVar("Draft")

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Between two attempts: a draft that is started again loads for half a minute, and isn't to wait as long again."""


class Rejoin(Generic[Draft]):
    """Ends what is left of a lost draft, and pairs with the next."""

    def __init__(
        self, *, end: Callable[[Draft], None], pair_again: Callable[[], Draft], offer: Callable[[Draft], None]
    ) -> None:
        """`end` and `pair_again` may take as long as they need. The latter waits for a draft, and raises UserError or
        ContractViolation where it came to nothing."""
        self._end = end
        self._pair_again = pair_again
        self._offer = offer
        self._lost: queue.SimpleQueue[Draft] = queue.SimpleQueue()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="dspark-rejoin", daemon=True).start()

    def lost(self, draft: Draft) -> None:
        """Returns at once."""
        self._lost.put(draft)

    def stop(self) -> None:
        """No further attempt; one that waits ends when its member leaves."""
        self._stopped.set()

    def _run(self) -> None:
        while True:
            self._end(self._lost.get())
            pause_s = FIRST_PAUSE_S
            while not self._stopped.wait(pause_s):
                try:
                    self._offer(self._pair_again())
                    break
                except (UserError, ContractViolation) as error:
                    log.warning("no draft yet: %s", error)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
