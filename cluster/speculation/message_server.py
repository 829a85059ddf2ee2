"""The draft's end of rounds that travel as messages. Knows channel and messages, nothing of torch and vLLM."""

import math
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.channel import Channel, ChannelError
from cluster.speculation.messages import (
    MessageCodec,
    MessageError,
    NoProposal,
    NoProposalReason,
    ProposeReply,
    ProposeRequest,
)


class Drafter(Protocol):
    def propose(self, request: ProposeRequest, /) -> NDArray[np.int64]:
        """The drafts [B, K]. The request's arrays are read before this returns, never kept."""


def serve(drafter: Drafter, channel: Channel, codec: MessageCodec, *, epoch: int) -> str:
    """Answer rounds until the channel ends; returns why it did."""
    request_buffer = memoryview(bytearray(codec.max_encoded_bytes))
    encoder = codec.encoder(memoryview(bytearray(codec.max_encoded_bytes)))
    last_step = 0
    while True:
        try:
            num_bytes = channel.recv(request_buffer, math.inf)
            answer = _answer(drafter, codec, request_buffer[:num_bytes], epoch, after=last_step)
            if answer is None:
                continue
            if isinstance(answer, ProposeReply):
                last_step = answer.step
            channel.send([encoder.encode(answer)], math.inf)
        except ChannelError as error:
            return str(error)


def _answer(
    drafter: Drafter, codec: MessageCodec, encoded: memoryview, epoch: int, *, after: int
) -> ProposeReply | NoProposal | None:
    """None for a round that is over: its states would be written for a block's last owner, and nobody waits."""
    try:
        request = codec.decode(encoded)
    except MessageError as error:
        return NoProposal(epoch=error.epoch, step=error.step, reason=error.reason)
    if not isinstance(request, ProposeRequest):
        return NoProposal(epoch=epoch, step=request.step, reason=NoProposalReason.DECODE_ERROR)
    if request.epoch != epoch:
        return NoProposal(epoch=request.epoch, step=request.step, reason=NoProposalReason.STALE_EPOCH)
    if request.step <= after:
        return None
    begun = time.perf_counter()
    draft_token_ids = drafter.propose(request)
    took_us = int(1e6 * (time.perf_counter() - begun))
    return ProposeReply(epoch=epoch, step=request.step, draft_token_ids=draft_token_ids, draft_time_us=took_us)
