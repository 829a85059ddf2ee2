"""The draft's process: `python -m cluster.speculation.draft_process`, with DraftSettings as JSON on its input.

It ends when its target ends.
"""

import json
import math
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cluster.channel import Channel, ChannelError, open_channel
from cluster.engine.cpu import profile
from cluster.engine.version import require_supported_vllm
from cluster.errors import UserError
from cluster.speculation import control
from cluster.speculation.handshake import EngineSizes, PoolSizes, RoundsOpen
from cluster.speculation.messages import (
    MessageCodec,
    MessageError,
    NoProposal,
    NoProposalReason,
    ProposeReply,
    ProposeRequest,
)

if TYPE_CHECKING:
    from cluster.speculation.hosted import HostedSpeculator

TARGET_START_TIMEOUT_S: Final = 600.0
"""For the target to load its weights and plan its KV cache: vLLM's own time-out for an engine's start."""

OPEN_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What the process is started with; all sizes come from the target."""

    name: str
    listener: int
    """File descriptor of the socket that the target connects to."""
    engine_args: dict[str, Any]
    """For vLLM's EngineArgs: those of the target."""


def run(settings: DraftSettings) -> None:
    """Pair with the target, load, serve until it ends.

    Raises:
        UserError: the pair can't start; the target was told.
    """
    say = _speaker(settings.name)
    say("waits for its target")
    line = control.accept(socket.socket(fileno=settings.listener))
    try:
        sizes = line.receive(EngineSizes, timeout_s=TARGET_START_TIMEOUT_S)
        require_supported_vllm()
        say("loads its weights")
        # Here, not above: vLLM takes half a minute to import, and the target needs someone to connect to.
        from cluster.speculation.hosted import HostedSpeculator

        hosted = HostedSpeculator(settings.engine_args, sizes)
        say("waits for the size of the target's KV cache")
        line.send(hosted.allocate(line.receive(PoolSizes, timeout_s=TARGET_START_TIMEOUT_S)))
        opened = line.receive(RoundsOpen, timeout_s=TARGET_START_TIMEOUT_S)
    except control.HandshakeError:
        raise  # the target is gone, or said it itself
    except UserError as error:
        line.refuse(error)
        raise
    codec = MessageCodec(opened.sizes, opened.digest)
    with open_channel(opened.channel, time.monotonic() + OPEN_TIMEOUT_S) as channel:
        say(f"serves rounds of epoch {opened.epoch}")
        say(f"stops: {serve(hosted, channel, codec, epoch=opened.epoch)}")


def serve(hosted: "HostedSpeculator", channel: Channel, codec: MessageCodec, *, epoch: int) -> str:
    """Answer rounds until the channel ends; returns why it did."""
    request_buffer = memoryview(bytearray(codec.max_encoded_bytes))
    answer_buffer = memoryview(bytearray(codec.max_encoded_bytes))
    while True:
        try:
            num_bytes = channel.recv(request_buffer, math.inf)
            answer = _answer(hosted, codec, request_buffer[:num_bytes], epoch)
            channel.send([answer_buffer[: codec.encode_into(answer, answer_buffer)]], math.inf)
        except ChannelError as error:
            return str(error)


def _answer(
    hosted: "HostedSpeculator", codec: MessageCodec, encoded: memoryview, epoch: int
) -> ProposeReply | NoProposal:
    try:
        request = codec.decode(encoded)
    except MessageError as error:
        return NoProposal(epoch=error.epoch, step=error.step, reason=error.reason)
    if not isinstance(request, ProposeRequest):
        return NoProposal(epoch=epoch, step=request.step, reason=NoProposalReason.DECODE_ERROR)
    if request.epoch != epoch:
        return NoProposal(epoch=request.epoch, step=request.step, reason=NoProposalReason.STALE_EPOCH)
    begun = time.perf_counter()
    draft_token_ids = hosted.propose(request)
    took_us = int(1e6 * (time.perf_counter() - begun))
    return ProposeReply(epoch=epoch, step=request.step, draft_token_ids=draft_token_ids, draft_time_us=took_us)


def _speaker(name: str) -> Callable[[str], None]:
    def say(what: str) -> None:
        print(f"{name} {what}", file=sys.stderr, flush=True)

    return say


def main() -> int:
    settings = DraftSettings(**json.load(sys.stdin))
    profile.activate()
    try:
        run(settings)
    except UserError as error:
        _speaker(settings.name)(f"stops: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
