"""The draft's process: `python -m cluster.speculation.draft_process`, started by `ChildProcess` with DraftSettings.

It ends when the process that started it ends.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from dspark.v1.control_pb2 import EngineSizes

from cluster.channel import Channel
from cluster.channel.base import LOOPBACK
from cluster.channel.device import DeviceChannel
from cluster.channel.faults import Faults, FaultsConfig
from cluster.contract.codec import from_plain
from cluster.contract.errors import ContractViolation
from cluster.control.child_process import end_with_parent, read_start
from cluster.control.member import Member
from cluster.control.refusals import ControlError
from cluster.control.settings import MemberSettings
from cluster.engine.cpu import profile
from cluster.engine.tracing import traced
from cluster.engine.version import require_supported_vllm, vllm_release
from cluster.errors import UserError
from cluster.speculation.messages import MessageCodec
from cluster.speculation.pairing import open_rounds

if TYPE_CHECKING:
    from cluster.speculation.hosted import HostedSpeculator

PAUSE_S: Final = 0.05
"""Before it joins again: what ended the rounds may be there still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What the process is started with; all sizes come from the target."""

    member: MemberSettings
    engine_args: dict[str, Any]
    """For vLLM's EngineArgs: those of the target."""
    host: str = LOOPBACK
    """This host's address, as the target's reaches it."""
    trace: str | None = None
    """The file for a trace of the rounds."""
    faults: FaultsConfig | None = None
    """On purpose, for tests."""

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """What `to_plain` made."""
        return cls(
            **plain
            | {"member": from_plain(MemberSettings, plain["member"])}
            | {"faults": None if plain.get("faults") is None else from_plain(FaultsConfig, plain["faults"])}
        )


def run(settings: DraftSettings, joined: Callable[[], None]) -> None:
    """Join, pair with the target, load, serve; and then again, with what is loaded and allocated, whatever ended the
    rounds. `joined` is called when the coordinator has this process.

    Returns where only a fresh process can serve again: a later target needs another contract, or the stream waits for
    device memory of a lost target.

    Raises:
        UserError, ContractViolation: the pair can't start; the target was told.
    """
    require_supported_vllm()
    say = _speaker(settings.member.name)
    hosted: HostedSpeculator | None = None
    last_epoch, serves_again = 0, False
    faults = Faults(settings.faults, "draft")
    while True:
        try:
            with Member(settings.member, vllm_version=vllm_release(), last_epoch=last_epoch) as member:
                if hosted is None:
                    joined()
                with member.reporting():
                    say("waits for its target")
                    sizes = member.meet_peer().engine_sizes
                    last_epoch = member.epoch
                    if hosted is None:
                        say("loads its weights")
                        hosted = _load(settings, sizes)
                        say("negotiates")
                        contract = hosted.allocate(member)
                        hosted.capture()
                    else:
                        contract = hosted.pair_again(member)
                    widths, take_kv = hosted.table_widths, hosted.take_kv
                    channel, codec = open_rounds(member, contract, widths, take_kv=take_kv, host=settings.host)
                    serves_again = not isinstance(channel, DeviceChannel)
                    say(f"serves rounds of epoch {member.epoch} under contract {contract.digest[:16]}")
                    served = _serve(settings, hosted, faults.around(channel), codec, epoch=member.epoch)
                    say(f"stops serving: {served}")
        except ControlError as error:
            if not serves_again:
                raise
            say(f"has no target: {error}")
        except (UserError, ContractViolation) as error:
            if not serves_again:
                raise
            say(f"can't serve this target: {error}")
            return
        if not serves_again:
            return
        time.sleep(PAUSE_S)


def _load(settings: DraftSettings, sizes: EngineSizes) -> "HostedSpeculator":
    # Here, not above: vLLM takes half a minute to import, and a process is to be known before that.
    from cluster.speculation.hosted import HostedSpeculator

    return HostedSpeculator(settings.engine_args, sizes)


def _serve(
    settings: DraftSettings, hosted: "HostedSpeculator", channel: Channel, codec: MessageCodec, *, epoch: int
) -> str:
    from cluster.speculation.draft_rounds import serve_rounds

    with channel, traced(None if settings.trace is None else Path(settings.trace), settings.member.name):
        return serve_rounds(hosted, channel, codec, epoch=epoch)


def _speaker(name: str) -> Callable[[str], None]:
    def say(what: str) -> None:
        print(f"{name} {what}", file=sys.stderr, flush=True)

    return say


def main() -> int:
    start = read_start()
    end_with_parent()
    settings = DraftSettings.from_plain(start.settings)
    profile.activate()
    try:
        run(settings, start.acknowledge)
    except (UserError, ContractViolation) as error:
        _speaker(settings.member.name)(f"stops: {error}")
        return 2
    return 0


def end(code: int) -> NoReturn:
    """Leave at once: to unload vLLM takes seconds, and there is nothing to save."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
