"""A channel that has device memory beside it: tensors go through that, and the two sides' streams wait for each other.

    request buffer  ──▶  the target's stream writes, then sets REQUEST to the round's step
    notice          ──▶  what the CPU knows, as a message of the channel
                         the draft's stream waits for REQUEST, reads, drafts
    reply buffer    ◀──  the draft's stream writes, sets ANSWERED to the step, then REPLY
                         the target's stream waits for REPLY, and takes the reply if ANSWERED is the step

REPLY is a word of host memory that the CPU can set, too: it ends the wait for a draft that is late or dead. The stream
then finds ANSWERED, in device memory, as it was, and knows that there is no reply. A round's buffers are free for the
next as soon as the target's stream has passed REPLY, so one of each is enough.
"""

from abc import abstractmethod
from enum import IntEnum
from typing import Final

from cluster.channel.base import Channel
from cluster.channel.errors import ChannelError

ANSWERED_OFFSET: Final = 0
"""Of the word ANSWERED in the reply buffer: in the place of a message's header."""

MAX_ROUNDS_AHEAD: Final = 8
"""Of the target's CPU before its stream, and so of the draft's before its own. vLLM's async scheduling is two ahead at
most."""

_WORD: Final = 1 << 32


class Flag(IntEnum):
    """Words of 32 bits."""

    REQUEST = 0
    REPLY = 1


def word_of(step: int) -> int:
    return step % _WORD


def has_reached(word: int, step: int) -> bool:
    """As a stream compares them (`CU_STREAM_WAIT_VALUE_GEQ`): the steps' order goes round with the word."""
    return (word - step) % _WORD < _WORD // 2


class DeviceChannel(Channel):
    """Addresses are of the device. `write` and `wait` are put on the current stream, and return at once."""

    request_address: int
    reply_address: int

    @abstractmethod
    def write(self, flag: Flag, step: int) -> None:
        """Set the flag when the stream gets here; what it wrote before is then there for whoever sees it."""

    @abstractmethod
    def wait(self, flag: Flag, step: int) -> None:
        """Let the stream go on when the flag has reached the step."""

    @abstractmethod
    def write_answered(self, step: int) -> None:
        """As `write`, of the word ANSWERED."""

    @abstractmethod
    def read(self, flag: Flag) -> int:
        """What the flag is now. From any thread."""

    @abstractmethod
    def release(self, step: int) -> None:
        """Set REPLY now, from any thread and on no stream: a stream that waits for this step or an earlier one goes
        on."""

    @abstractmethod
    def gone(self) -> ChannelError | None:
        """Why there is nobody to talk to, if so. From any thread, in a microsecond."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all it was given. Not on the way of a round."""
