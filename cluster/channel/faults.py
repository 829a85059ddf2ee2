"""Faults on purpose, for tests: a channel that loses, changes and repeats messages, and ends its process.

A config says which: `faults:` of a cluster's file. Nothing of this is in the way of a pair that has none.
"""

import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.channel.base import Channel
from cluster.channel.device import DeviceChannel
from cluster.channel.errors import DeadlineExceeded
from cluster.contract.errors import DocumentError, require_positive
from cluster.errors import UserError

Message = Literal["request", "reply"]
Action = Literal["drop", "delay", "corrupt", "truncate", "duplicate", "reorder", "cut"]
Point = Literal["target.sent", "target.received", "draft.received", "draft.sent"]
Side = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFault:
    """What becomes of a message on its way. It happens at the target's end, in both directions."""

    message: Message
    action: Action
    """drop: it never arrives. delay: by `seconds`. corrupt: one byte is another. truncate: its second half is missing.
    duplicate: it comes twice. reorder: it comes again behind the next one, as from a network that repeats and
    reorders. cut: for `seconds` neither it nor any other message arrives."""
    nth: int = 1
    """Which of its kind, from 1, over all channels of a pair."""
    every: int | None = None
    """And then each so many."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        require_positive(nth=self.nth, every=self.every)
        if (self.seconds > 0) != (self.action in ("delay", "cut")):
            raise DocumentError("seconds", str(self.seconds), "positive for delay and cut, and left out for others")

    def is_due(self, count: int) -> bool:
        return count == self.nth or (
            self.every is not None and count > self.nth and (count - self.nth) % self.every == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KillFault:
    """The process ends, as by SIGKILL, the nth time that it comes to this point."""

    at: Point
    nth: int = 1

    def __post_init__(self) -> None:
        require_positive(nth=self.nth)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """With none of them, they may come later (`Faults.begin`)."""

    messages: tuple[MessageFault, ...] = ()
    kills: tuple[KillFault, ...] = ()
    seed: int = 0
    """Of the bytes that are corrupted."""


class Faults:
    """One side's, over all channels that it has one after the other."""

    def __init__(self, config: FaultsConfig | None, side: Side) -> None:
        self._is_possible = config is not None
        self._side: Side = side
        self.begin(config or FaultsConfig())

    def begin(self, config: FaultsConfig) -> None:
        """From now on it is these, counted from here."""
        self._config = config
        self._random = random.Random(config.seed)
        self._messages: Counter[Message] = Counter()
        self._points: Counter[Point] = Counter()
        self._cut_until_s = 0.0

    def around(self, channel: Channel) -> Channel:
        """The channel with these faults; the channel itself, where the config has no `faults`.

        Raises:
            UserError: it carries no messages that could be changed.
        """
        if not self._is_possible:
            return channel
        if isinstance(channel, DeviceChannel):
            raise UserError("faults", "a channel between GPUs has none to offer", "use shm or gloo, or leave them out")
        return _FaultyChannel(channel, self)

    def due(self, message: Message) -> MessageFault | None:
        """What becomes of the next message of this kind."""
        if self._side != "target":
            return None
        self._messages[message] += 1
        count = self._messages[message]
        fault = next((each for each in self._config.messages if each.message == message and each.is_due(count)), None)
        now_s = time.monotonic()
        if fault is not None and fault.action == "cut":
            self._cut_until_s = now_s + fault.seconds
        if now_s < self._cut_until_s:
            return _DROPPED[message]
        return fault

    def reach(self, what: Literal["sent", "received"]) -> None:
        """This side has sent or received a message; perhaps its process ends here."""
        point: Point = f"{self._side}.{what}"  # type: ignore[assignment]  # mypy doesn't multiply literals
        self._points[point] += 1
        if any(kill.at == point and kill.nth == self._points[point] for kill in self._config.kills):
            os.kill(os.getpid(), signal.SIGKILL)

    def corrupted(self, message: bytes) -> bytes:
        position = self._random.randrange(len(message))
        changed = message[position] ^ self._random.randrange(1, 256)
        return message[:position] + bytes([changed]) + message[position + 1 :]


_DROPPED: dict[Message, MessageFault] = {
    "request": MessageFault(message="request", action="drop"),
    "reply": MessageFault(message="reply", action="drop"),
}


class _FaultyChannel(Channel):
    def __init__(self, channel: Channel, faults: Faults) -> None:
        self._channel = channel
        self._faults = faults
        self._again: bytes | None = None
        """To send behind the next one."""
        self._received: deque[bytes] = deque()
        """To be received before what comes."""
        self._received_late: bytes | None = None
        """To be received behind the next one."""
        self.max_send_bytes = channel.max_send_bytes
        self.max_receive_bytes = channel.max_receive_bytes

    def send(self, parts: Sequence[memoryview], deadline_s: float) -> int:
        message = b"".join(parts)
        for each in self._outgoing(message):
            self._channel.send([memoryview(each)], deadline_s)
        self._faults.reach("sent")
        return len(message)

    def recv(self, into: memoryview, deadline_s: float) -> int:
        while not self._received:
            num_bytes = self._channel.recv(into, deadline_s)
            self._received.extend(self._incoming(bytes(into[:num_bytes]), deadline_s))
        message = self._received.popleft()
        into[: len(message)] = message
        self._faults.reach("received")
        return len(message)

    def abort(self) -> None:
        self._channel.abort()

    def close(self) -> None:
        self._channel.close()

    def _outgoing(self, message: bytes) -> list[bytes]:
        """What is sent in the place of a message, at this moment."""
        fault = self._faults.due("request")
        again, self._again = self._again, None
        late = [again] if again is not None else []
        if fault is None:
            return [message, *late]
        if fault.action == "delay":
            time.sleep(fault.seconds)
        if fault.action == "reorder":
            self._again = message
        return [*_changed(message, fault, self._faults), *late]

    def _incoming(self, message: bytes, deadline_s: float) -> list[bytes]:
        """What is received in the place of a message, at this moment.

        Raises:
            DeadlineExceeded: it is delayed beyond it.
        """
        fault = self._faults.due("reply")
        again, self._received_late = self._received_late, None
        late = [again] if again is not None else []
        if fault is None:
            return [message, *late]
        if fault.action == "delay":
            time.sleep(max(0.0, min(fault.seconds, deadline_s - time.monotonic())))
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded("the reply was delayed")
        if fault.action == "reorder":
            self._received_late = message
        return [*_changed(message, fault, self._faults), *late]


def _changed(message: bytes, fault: MessageFault, faults: Faults) -> list[bytes]:
    match fault.action:
        case "drop" | "cut":
            return []
        case "corrupt":
            return [faults.corrupted(message)]
        case "truncate":
            return [message[: max(1, len(message) // 2)]]
        case "duplicate":
            return [message, message]
    return [message]
