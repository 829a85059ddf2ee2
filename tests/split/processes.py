"""Processes for tests with real engines. vLLM is imported once, in a server that forks a process for each."""

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 180
"""For one engine to start on a machine that does other things; it takes 5 s, and the first import of vLLM 30 s."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["cluster.engine.cpu.profile", "vllm", "cluster.engine.contract_worker"])


class Child:
    """A process that runs `function(*arguments, report)`, where `report` sends one JSON document here."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(function, arguments, theirs), name=function.__name__)
        self._process.start()
        theirs.close()

    def report(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """What it reported. It has ended then."""
        report = self.message(deadline_s)
        self._connection.send_bytes(b"{}")
        self._process.join(DEADLINE_S)
        return report

    def message(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """What it reported, while it waits for `report`, or goes on in another thread."""
        if not self._connection.poll(deadline_s):
            self._process.kill()
            raise TimeoutError(f"{self._process.name} has reported nothing in {deadline_s} s")
        message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return message

    def kill(self) -> None:
        """With no chance for it to clean up."""
        self._process.kill()
        self._process.join(DEADLINE_S)


def _run(function: Callable[..., None], arguments: tuple[Any, ...], connection: Connection) -> None:
    def report(document: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(document).encode())
        connection.recv_bytes()  # the reader has it

    function(*arguments, report)
