"""A channel that has device memory beside it: tensors go through that, and the two sides' streams wait for each other.

    request buffer  ──▶  the target's stream writes it, and lets the draft have it (`request`)
    notice          ──▶  what the CPU knows, as a message of the channel
                         the draft's stream waits for the request (`await_request`), reads, drafts
    reply buffer    ◀──  the draft's stream writes it, sets ANSWERED to the step, and lets it go (`reply`)
                         the target's stream waits for REPLY (`await_reply`), and takes the reply if ANSWERED is right

REPLY is a word of host memory that the CPU can set, too: it ends the wait for a draft that is late or dead. The stream
then finds ANSWERED, in device memory, as it was, and knows that there is no reply. A round's buffers are free for the
next as soon as the target's stream has passed REPLY, so one of each is enough. Between buffers of their own a reply may
be cut off behind its ANSWERED: then its tokens are none, which is found, or any, which costs speed alone.

REQUEST is a word of host memory, too: by it the target's CPU, which is ahead of its stream, sees since when that waits
for the draft.
"""

from abc import abstractmethod
from typing import Any, Final, Protocol

from cluster.channel.base import Channel
from cluster.channel.errors import ChannelError

ANSWERED_OFFSET: Final = 0
"""Of the word ANSWERED in the reply buffer: in the place of a message's header."""

MAX_ROUNDS_AHEAD: Final = 8
"""Of the target's CPU before its stream, and so of the draft's before its own. vLLM's async scheduling is two ahead at
most."""

_WORD: Final = 1 << 32


def word_of(step: int) -> int:
    return step % _WORD


def has_reached(word: int, step: int) -> bool:
    """As a stream compares them (`CU_STREAM_WAIT_VALUE_GEQ`): the steps' order goes round with the word."""
    return (word - step) % _WORD < _WORD // 2


class StreamEvent(Protocol):
    """A point of the stream that was current when it was recorded, and when that came there. As torch has them."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds until another one. The stream must have passed both."""


class DeviceChannel(Channel):
    """Addresses are of this side's device, and steps words of 32 bits.

    The four that make a round are put on the current stream, and return at once. A buffer's bytes are counted from its
    start, and both sides give the same numbers.
    """

    request_address: int
    reply_address: int

    @abstractmethod
    def request(self, step: int, num_bytes: int, reply_bytes: int) -> None:
        """When the stream gets here, the first `num_bytes` of the request are written: the draft may have them, and
        REQUEST is the step. Its reply will have `reply_bytes`.

        Raises ChannelError where there is nobody to have them.
        """

    @abstractmethod
    def await_request(self, step: int, num_bytes: int) -> None:
        """Let the stream go on when the request is there. Raises ChannelError where none can come."""

    @abstractmethod
    def reply(self, step: int, num_bytes: int) -> None:
        """When the stream gets here, the reply is written, but for ANSWERED: the target may have it.

        Raises ChannelError where there is nobody to have it.
        """

    @abstractmethod
    def await_reply(self, step: int) -> None:
        """Let the stream go on when REPLY has reached the step."""

    @property
    @abstractmethod
    def requested(self) -> int:
        """What REQUEST is now. From any thread of the target."""

    @property
    @abstractmethod
    def replied(self) -> int:
        """What REPLY is now. From any thread of the target."""

    @abstractmethod
    def release(self, step: int) -> None:
        """Set REPLY now, from any thread of the target and on no stream: a stream that waits for this step or an
        earlier one goes on. There are no rounds afterwards."""

    @abstractmethod
    def gone(self) -> ChannelError | None:
        """Why there is nobody to talk to, if so. From any thread, in a microsecond."""

    @abstractmethod
    def new_event(self) -> StreamEvent:
        """For a stream of this side."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all it was given. Not on the way of a round."""
