"""The draft's process: `python -m cluster.speculation.draft_process`, started by `ChildProcess` with DraftSettings.

It ends when its target ends.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from cluster.channel import Channel, ChannelError
from cluster.contract.errors import ContractViolation
from cluster.control.child_process import read_start
from cluster.control.member import Member
from cluster.control.settings import MemberSettings
from cluster.engine.cpu import profile
from cluster.engine.release import vllm_release
from cluster.errors import UserError
from cluster.speculation.messages import (
    MessageCodec,
    MessageError,
    NoProposal,
    NoProposalReason,
    ProposeReply,
    ProposeRequest,
)
from cluster.speculation.pairing import open_rounds
from cluster.speculation.settings import LOOPBACK

if TYPE_CHECKING:
    from cluster.speculation.hosted import HostedSpeculator


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What the process is started with; all sizes come from the target."""

    member: MemberSettings
    engine_args: dict[str, Any]
    """For vLLM's EngineArgs: those of the target."""
    host: str = LOOPBACK
    """This host's address, as the target's reaches it."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """What `dataclasses.asdict` made."""
        return cls(**plain | {"member": MemberSettings(**plain["member"])})


def run(settings: DraftSettings, joined: Callable[[], None]) -> None:
    """Join, pair with the target, load, serve until it ends. `joined` is called when the coordinator has this process.

    Raises:
        UserError, ContractViolation: the pair can't start; the target was told.
    """
    say = _speaker(settings.member.name)
    with Member(settings.member, vllm_version=vllm_release()) as member, member.reporting():
        joined()
        say("waits for its target")
        sizes = member.meet_peer().engine_sizes
        say("loads its weights")
        # Here, not above: vLLM takes half a minute to import, and a process is to be known before that.
        from cluster.speculation.hosted import HostedSpeculator

        hosted = HostedSpeculator(settings.engine_args, sizes)
        say("negotiates")
        contract = hosted.allocate(member)
        channel, codec = open_rounds(member, contract, hosted.table_widths, host=settings.host)
        with channel:
            say(f"serves rounds of epoch {member.epoch} under contract {contract.digest[:16]}")
            say(f"stops: {serve(hosted, channel, codec, epoch=member.epoch)}")


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
    start = read_start()
    settings = DraftSettings.from_plain(start.settings)
    profile.activate()
    try:
        run(settings, start.acknowledge)
    except (UserError, ContractViolation) as error:
        _speaker(settings.member.name)(f"stops: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
