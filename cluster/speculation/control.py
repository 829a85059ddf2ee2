"""The handshake's line between target and draft on one host: JSON documents, each of a type that its reader expects.

It carries no round: those have a channel, which also notices the other side's end.
"""

import json
import socket
from multiprocessing.connection import Client, Connection
from typing import Any, TypeVar

from cluster.contract.codec import from_plain, parse, to_plain
from cluster.contract.errors import DocumentError
from cluster.errors import UserError

T = TypeVar("T")


class HandshakeError(UserError):
    """The pair can't start: the other side is gone, silent, refuses, or says what isn't expected."""


class ControlLine:
    """One end. `peer` is what the other side is called in messages: "draft" or "target"."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self._connection = connection
        self._peer = peer

    def send(self, document: object) -> None:
        """Send a dataclass of this package."""
        self._send({type(document).__name__: to_plain(document)})

    def refuse(self, error: UserError) -> None:
        """Tell the other side why this one gives up."""
        self._send({"refused": [error.what, error.why, error.remedy]})

    def receive(self, cls: type[T], *, timeout_s: float) -> T:
        """The next document, which must be a `cls`.

        Raises:
            HandshakeError: none came, or another one, or a refusal.
        """
        plain = self._receive(cls.__name__, timeout_s)
        refused = plain.get("refused")
        if isinstance(refused, list) and len(refused) == 3:
            raise HandshakeError(*map(str, refused))
        try:
            return from_plain(cls, plain.get(cls.__name__))
        except DocumentError as error:
            raise self._broken(f"it sent {', '.join(plain)} where {cls.__name__} was due ({error.what})") from error

    def close(self) -> None:
        self._connection.close()

    def _send(self, plain: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(plain).encode())
        except OSError as error:
            raise self._broken("its process has ended") from error

    def _receive(self, expected: str, timeout_s: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(timeout_s):
                raise self._broken(f"it sent no {expected} in {timeout_s:.0f} s")
            return parse(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._broken("its process has ended") from error
        except DocumentError as error:
            raise self._broken(str(error)) from error

    def _broken(self, why: str) -> HandshakeError:
        return HandshakeError(
            f"the {self._peer}'s side can't be paired", why, f"look at what the {self._peer}'s process wrote last"
        )


def listen(address: str) -> socket.socket:
    """A listening Unix socket, for the draft's process to inherit: the target can connect before it runs."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(1)
    return listener


def accept(listener: socket.socket) -> ControlLine:
    """The draft's end, once the target has connected."""
    accepted, _ = listener.accept()
    return ControlLine(Connection(accepted.detach()), "target")


def connect(address: str) -> ControlLine:
    """The target's end.

    Raises:
        HandshakeError: nobody listens there.
    """
    try:
        return ControlLine(Client(address, "AF_UNIX"), "draft")
    except OSError as error:
        raise HandshakeError(
            "the draft's side can't be paired", f"nobody listens at {address} ({error})", "start the draft's process"
        ) from error
