"""The target's end of the rounds: a request out, its answer in. Knows channel and messages, nothing of vLLM."""

import time
from dataclasses import dataclass, fields

from cluster.channel import Channel
from cluster.speculation.messages import (
    AwaitedReply,
    MessageCodec,
    MessageError,
    NoProposal,
    NoProposalReason,
    ProposeReply,
    ProposeRequest,
)
from cluster.speculation.pace import Pace
from cluster.speculation.warm_up import WARM_UP_DEADLINE_S, warm_up_requests


@dataclass(slots=True)
class RoundTimes:
    """Seconds and bytes of all rounds together, by part, as the target sees them."""

    rounds: int = 0
    fuse: float = 0.0
    """The draft's `fc`, which runs here."""
    encode: float = 0.0
    round_trip: float = 0.0
    """From the encoded request to the received answer: the target waits."""
    draft: float = 0.0
    """The part of it in which the draft's model worked, as the draft's clock says."""
    decode: float = 0.0
    wait: float = 0.0
    """Through a GPU's memory, where the stream waits and no other part but `fuse` is timed: from the request to the
    reply, by the stream's clock. There, the draft and back, which nobody tells apart; known a round or two later."""
    request_bytes: int = 0
    reply_bytes: int = 0

    @property
    def transfer(self) -> float:
        """Both ways, with both wake-ups and the draft's codec. The target's clock can't tell sending from waiting:
        waking the draft may put it on this core at once, and `send` returns after it."""
        return self.round_trip - self.draft

    @property
    def split(self) -> float:
        """What a draft in the target's process wouldn't take; `fuse` it would."""
        return self.encode + self.transfer + self.decode

    def since(self, before: "RoundTimes") -> "RoundTimes":
        """Of the rounds after `before` was copied."""
        return RoundTimes(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """How a target stands with its draft. `lost`: it goes on alone, for now."""

    times: RoundTimes
    epoch: int
    """Of the last draft that there was."""
    lost: bool
    losses: int = 0
    """So far."""
    resting: bool = False
    """Whether it asks for no drafts, because they don't pay."""
    rests: int = 0
    """So far."""


class DraftClient:
    """One round at a time, in order: the draft must not write for a block's last owner after its next one began."""

    def __init__(self, channel: Channel, codec: MessageCodec, *, epoch: int, pace: Pace, times: RoundTimes) -> None:
        """`pace` says how long a round may take, from its request's encoding to its answer; it and `times` go on from
        one draft to the next."""
        self.times = times
        self._channel = channel
        self._codec = codec
        self._epoch = epoch
        self._pace = pace
        self._step = 0
        self._request = codec.encoder(memoryview(bytearray(codec.max_encoded_bytes)))
        self._answer_buffer = memoryview(bytearray(codec.max_encoded_bytes))

    def propose(self, request: ProposeRequest) -> ProposeReply | NoProposal:
        """The draft's answer to this round, whose epoch and step are filled in here.

        Its arrays are views of a buffer that the next round overwrites.

        Raises:
            ChannelError: the draft is gone, or hasn't answered within the deadline.
            MessageError: the round doesn't fit the agreed sizes, or the peer has others.
        """
        self._step += 1
        deadline_s = time.monotonic() + self._pace.allowed_s(request.num_tokens)
        begun_s = time.perf_counter()
        request.epoch, request.step = self._epoch, self._step
        encoded = self._request.encode(request)
        encoded_s = time.perf_counter()
        self._channel.send([encoded], deadline_s)
        awaited = self._codec.awaited_reply(request, self._answer_buffer)
        answer, answer_bytes, received_s = self._answer(awaited, deadline_s)
        decoded_s = time.perf_counter()
        times = self.times
        times.rounds += 1
        times.encode += encoded_s - begun_s
        times.round_trip += received_s - encoded_s
        times.decode += decoded_s - received_s
        times.request_bytes += len(encoded)
        times.reply_bytes += answer_bytes
        if isinstance(answer, ProposeReply):
            times.draft += answer.draft_time_us / 1e6
            self._pace.took(request.num_tokens, received_s - begun_s)
        return answer

    def warm_up(self) -> None:
        """Rounds that no request depends on; their times are nobody's.

        Raises:
            ChannelError, MessageError: as of `propose`.
        """
        times, pace = self.times, self._pace
        self.times, self._pace = RoundTimes(), Pace(deadline_s=WARM_UP_DEADLINE_S, stall_limit_s=None)
        for request in warm_up_requests(self._codec.sizes):
            self.propose(request)
        self.times, self._pace = times, pace

    def _answer(self, awaited: AwaitedReply, deadline_s: float) -> tuple[ProposeReply | NoProposal, int, float]:
        """The answer to this step, its bytes, and when it came. What answers an earlier one is late, and dropped; what
        can't be read is no proposal."""
        while True:
            num_bytes = self._channel.recv(self._answer_buffer, deadline_s)
            received_s = time.perf_counter()
            answer = awaited.read(num_bytes)
            if answer is not None:
                return answer, num_bytes, received_s
            try:
                other = self._codec.decode(self._answer_buffer[:num_bytes])
            except MessageError as error:
                if error.reason is NoProposalReason.WRONG_DIGEST:
                    raise  # not a byte that was changed, but a peer under another contract
                return self._none(error.reason), num_bytes, received_s
            if isinstance(other, ProposeReply | NoProposal) and self._is_due(other):
                fits = isinstance(other, NoProposal) or awaited.has_its_shape(other)
                return other if fits else self._none(NoProposalReason.DECODE_ERROR), num_bytes, received_s

    def _none(self, reason: NoProposalReason) -> NoProposal:
        return NoProposal(epoch=self._epoch, step=self._step, reason=reason)

    def _is_due(self, answer: ProposeReply | NoProposal) -> bool:
        if (answer.epoch, answer.step) == (self._epoch, self._step):
            return True
        return isinstance(answer, NoProposal) and answer.step == 0  # the draft couldn't read the round's header

    def abort(self) -> None:
        """End the round that is waited for, from any thread; there is no other after it."""
        self._channel.abort()

    def close(self) -> None:
        self._channel.close()
