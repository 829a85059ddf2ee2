"""The barrier's line over a socket, for tests: JSON documents, one connection a side, and one coordinator for both."""

import json
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

from cluster.contract.negotiator import Negotiator

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError
from cluster.contract.facts import SideFacts
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from tests.split.processes import DEADLINE_S

_KEYS = ("field", "target", "draft", "reason", "remedy")


class SocketNegotiator(Negotiator):
    """The worker's end."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._connection = Client(settings["address"], "AF_UNIX")

    def agree(self, facts: SideFacts) -> KVContract:
        return KVContract.from_json(self._ask({"facts": facts.to_json()})["contract"])

    def ready(self, digest: str) -> None:
        self._ask({"ready": digest})

    def failed(self, error: Exception) -> None:
        _send(self._connection, {"failed": str(error)})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        _send(self._connection, question)
        answer = _receive(self._connection)
        if "refused" in answer:
            raise ContractError(answer["refused"].pop("field"), **answer["refused"])
        return answer


class Coordinator:
    """Waits for facts of both sides, answers both with one contract or one refusal; then for both to be ready."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.address = str(folder / "coordinator")
        self.contract: KVContract | None = None
        self._policy = policy
        self._listener = Listener(self.address, "AF_UNIX")
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._listener.close()

    def _run(self) -> None:
        sides = [self._listener.accept() for _ in range(2)]
        facts = {}
        for side in sides:
            one = SideFacts.from_json(_receive(side)["facts"])
            facts[one.role] = one
        try:
            self.contract = negotiate(facts["target"], facts["draft"], self._policy)
        except ContractError as refusal:
            return _answer(sides, {"refused": {key: getattr(refusal, key) for key in _KEYS}})
        _answer(sides, {"contract": self.contract.to_json()})
        reports = [_receive(side) for side in sides]
        failures = [report["failed"] for report in reports if "failed" in report]
        if failures:
            refused = {"field": "peer", "target": "failed", "draft": None, "reason": failures[0], "remedy": "mend it"}
            return _answer(sides, {"refused": refused})
        return _answer(sides, {"go": self.contract.digest})


def _answer(sides: list[Connection], document: dict[str, Any]) -> None:
    for side in sides:
        _send(side, document)


def _send(connection: Connection, document: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(document).encode())
    except BrokenPipeError:  # the side that failed has gone
        return


def _receive(connection: Connection) -> dict[str, Any]:
    if not connection.poll(DEADLINE_S):
        raise TimeoutError("the other end of the barrier is silent")
    document: dict[str, Any] = json.loads(connection.recv_bytes())
    return document
