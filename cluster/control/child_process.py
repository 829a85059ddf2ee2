"""A process of ours beside this one: started with settings as JSON, and watched until it says that it is there.

Started afresh, never forked: gRPC, whose threads a fork would lose, may run on both sides.
"""

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from cluster.errors import UserError

START_TIMEOUT_S: Final = 60.0
"""To start Python and import gRPC; it takes a second, and on a fresh machine that does other things many."""


class ChildProcess:
    """The parent's end. `name` is what the process is called in messages.

    The process's standard input stays open until `stop`, so that it can tell when this process has ended.
    """

    def __init__(
        self, name: str, module: str, settings: dict[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `python -m module`, and don't wait for it. `environment` goes over this process's."""
        self._name = name
        ours, theirs = os.pipe()
        self._acknowledgement = os.fdopen(ours, "rb", buffering=0)
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs],
                env=os.environ | dict(environment or {}),
            )
        finally:
            os.close(theirs)
        assert self.popen.stdin is not None
        line = json.dumps({"settings": settings, "acknowledgement": theirs})
        with suppress(BrokenPipeError):  # it has ended already, which `await_start` says
            self.popen.stdin.write(f"{line}\n".encode())

    def await_start(self) -> None:
        """Wait until it has acknowledged; once.

        Raises:
            UserError: it has ended instead, stopped or by itself, or is silent.
        """
        with self._acknowledgement as acknowledgement:
            poll = select.poll()
            poll.register(acknowledgement)
            if not poll.poll(1e3 * START_TIMEOUT_S):
                why = f"it is not there after {START_TIMEOUT_S:.0f} s"
            elif acknowledgement.read(1):
                return
            else:
                why = f"it ended with exit code {self.popen.wait(START_TIMEOUT_S)}"
        raise UserError(f"the {self._name}'s process", why, "look at what it wrote last")

    def stop(self, timeout_s: float) -> None:
        """End its input, and wait for it to end; it is killed after `timeout_s`. A second call does nothing. Another
        thread may be in `await_start`, and learns of it there."""
        assert self.popen.stdin is not None
        if self.popen.stdin.closed:
            return
        self.popen.stdin.close()
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a process was started with."""

    settings: dict[str, Any]
    acknowledgement: int
    """A file descriptor."""

    def acknowledge(self) -> None:
        """Tell the parent that this process is there."""
        os.write(self.acknowledgement, b"1")
        os.close(self.acknowledgement)


def read_start() -> Start:
    """In the child, first of all."""
    return Start(**json.loads(sys.stdin.readline()))


def end_with_parent() -> None:
    """In the child, after `read_start`: end when the parent does, or stops this process, whatever it is doing."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, name="dspark-parent", daemon=True).start()
