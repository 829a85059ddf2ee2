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
        ContractViolation where it came to nothing; whatever else either raises is in the log with where it comes
        from. `offer` returns at once."""
        self._end = end
        self._pair_again = pair_again
        self._offer = offer
        self._lost: queue.SimpleQueue[Draft | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._offering = threading.Lock()
        threading.Thread(target=self._run, name="dspark-rejoin", daemon=True).start()

    def lost(self, draft: Draft) -> None:
        """Returns at once."""
        self._lost.put(draft)

    def stop(self) -> None:
        """No further attempt, and none is offered any more; one that waits ends when its member leaves."""
        with self._offering:
            self._stopped.set()
        self._lost.put(None)

    def _run(self) -> None:
        while self._ends_one():
            pause_s = FIRST_PAUSE_S
            while not self._stopped.wait(pause_s) and not self._finds_one():
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _ends_one(self) -> bool:
        lost = self._lost.get()
        if lost is None:
            return False
        self._try_to_end(lost)
        return True

    def _finds_one(self) -> bool:
        """Or needs none any more."""
        try:
            draft = self._pair_again()
        except (UserError, ContractViolation) as error:
            log.warning("no draft yet: %s", error)
            return False
        except Exception:
            log.exception("no draft yet")
            return False
        with self._offering:
            if not self._stopped.is_set():
                self._offer(draft)
                return True
        self._try_to_end(draft)
        return True

    def _try_to_end(self, draft: Draft) -> None:
        """What it leaves behind is no reason to go without another."""
        try:
            self._end(draft)
        except Exception:
            log.exception("what is left of a draft didn't end")
