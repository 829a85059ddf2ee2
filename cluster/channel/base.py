"""What every channel does, and what is known of it before it is open."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self

from cluster.contract.codec import from_plain, parse, to_plain, to_text
from cluster.contract.errors import require_positive

ChannelKind = Literal["shm", "gloo", "cuda_ipc", "nccl"]

LOOPBACK: Final = "127.0.0.1"
"""A host's address where the peer is on it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """All that the opening side must know. Plain data: it travels in a control message."""

    kind: ChannelKind
    location: str
    """shm: the segment's name. gloo: host:port/token. cuda_ipc, nccl: documents of their own."""
    num_slots: int
    """Messages that may wait in each direction; a further `send` waits for the receiver."""
    max_bytes_from_offerer: int
    max_bytes_from_opener: int
    """The largest message that each side sends."""

    def __post_init__(self) -> None:
        require_positive(
            num_slots=self.num_slots,
            max_bytes_from_offerer=self.max_bytes_from_offerer,
            max_bytes_from_opener=self.max_bytes_from_opener,
        )

    def to_json(self) -> str:
        return to_text(to_plain(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ChannelAddress":
        """Raises DocumentError with the key that is wrong. That the location exists shows when it's opened."""
        return from_plain(cls, parse(text))


class Channel(ABC):
    """Whole messages, in order, in both directions.

    One thread at a time sends and one receives; they may be two. `abort` is for any thread. Deadlines are points of
    `time.monotonic()` in seconds, so one deadline can span several calls; `math.inf` waits for as long as the peer
    lives. A deadline that passed leaves the channel as it was.
    """

    max_send_bytes: int
    max_receive_bytes: int

    @abstractmethod
    def send(self, parts: Sequence[memoryview], deadline_s: float) -> int:
        """Send one message, the parts one after the other; returns its length. The parts may be reused at once.

        Raises:
            ValueError: the message is empty or longer than `max_send_bytes`.
            DeadlineExceeded: the peer hasn't made room in time.
            ChannelClosed, PeerDied: nobody will receive it.
        """

    @abstractmethod
    def recv(self, into: memoryview, deadline_s: float) -> int:
        """Receive the next message into the start of `into`; returns its length.

        Messages that the peer sent before it closed or died are received first.

        Raises:
            ValueError: `into` is shorter than the message, which stays to be received.
            DeadlineExceeded: none came in time.
            ChannelClosed, PeerDied: none will come.
            ChannelCorrupted: what came is no message.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the channel now, from any thread, with what is on its way.

        Whoever waits in it gets ChannelClosed; so does the peer, or PeerDied where it only sees a connection end.
        """

    @abstractmethod
    def close(self) -> None:
        """End the channel and give back what it holds. A peer that goes on receiving gets what was sent before.

        May be called twice. For the thread that uses the channel: another one calls `abort`, and waits for it.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ChannelOffer(ABC):
    """A channel that the peer hasn't opened yet."""

    address: ChannelAddress

    @abstractmethod
    def accept(self, deadline_s: float) -> Channel:
        """The channel, as soon as the peer has opened it. The offer is then spent.

        Raises:
            DeadlineExceeded: the peer didn't come. The offer is withdrawn.
        """

    @abstractmethod
    def withdraw(self) -> None:
        """Give back what the offer holds; nothing, if it was accepted."""


def message_length(parts: Sequence[memoryview], limit: int) -> int:
    num_bytes = sum(part.nbytes for part in parts)
    if not 0 < num_bytes <= limit:
        raise ValueError(f"a message of {num_bytes} bytes: this channel sends 1 to {limit}")
    return num_bytes


def require_room(into: memoryview, num_bytes: int) -> None:
    if into.nbytes < num_bytes:
        raise ValueError(f"the message has {num_bytes} bytes, the buffer to receive it {into.nbytes}")
