"""A process beside this one that is started again whenever it ends."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from cluster.control.child_process import ChildProcess
from cluster.errors import UserError

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
"""Before a restart: doubled each time, so that a process that can't run isn't started all the time."""

STEADY_AFTER_S: Final = 60.0
"""A process that has run as long is one that can: its end is no sign of anything."""


class SupervisedProcess:
    """As a ChildProcess, and after its first start kept there until `stop`."""

    def __init__(
        self, name: str, module: str, settings: dict[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """As of a ChildProcess: start it, and don't wait for it."""
        self._name = name
        self._module = module
        self._settings = settings
        self._environment = environment
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._child = ChildProcess(name, module, settings, environment)
        self._thread: threading.Thread | None = None
        self.restarts = 0

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        """The process that there is now."""
        return self._child.popen

    def await_start(self) -> None:
        """Wait until the first one has acknowledged; from then on it is supervised.

        Raises:
            UserError: it has ended instead, or is silent.
        """
        self._child.await_start()
        self._thread = threading.Thread(target=self._supervise, name=f"dspark-supervise-{self._name}", daemon=True)
        self._thread.start()

    def let_end(self) -> None:
        """Start it no more: it is about to end by itself. `stop` comes then."""
        self._stopped.set()

    def stop(self, timeout_s: float) -> None:
        """End it for good. A second call does nothing."""
        self._stopped.set()
        with self._lock:
            self._child.stop(timeout_s)

    def _supervise(self) -> None:
        pause_s, started_s = FIRST_PAUSE_S, time.monotonic()
        while True:
            code = self._child.popen.wait()
            if time.monotonic() - started_s > STEADY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            if self._stopped.wait(pause_s):
                return
            print(f"the {self._name}'s process has ended ({code}), and is started again", file=sys.stderr, flush=True)
            pause_s, started_s = min(2 * pause_s, LONGEST_PAUSE_S), time.monotonic()
            with self._lock:
                if self._stopped.is_set():
                    return
                self._child.stop(0)
                self._child = ChildProcess(self._name, self._module, self._settings, self._environment)
            self.restarts += 1
            try:
                self._child.await_start()
            except UserError as error:
                if not self._stopped.is_set():
                    print(f"{error}", file=sys.stderr, flush=True)
