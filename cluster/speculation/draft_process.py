"""The draft's process: `python -m cluster.speculation.draft_process`, started by `ChildProcess` with DraftSettings.

It ends when its target ends.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from cluster.contract.errors import ContractViolation
from cluster.control.child_process import read_start
from cluster.control.member import Member
from cluster.control.settings import MemberSettings
from cluster.engine.cpu import profile
from cluster.engine.version import require_supported_vllm, vllm_release
from cluster.errors import UserError
from cluster.speculation.pairing import open_rounds
from cluster.speculation.settings import LOOPBACK


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
    require_supported_vllm()
    say = _speaker(settings.member.name)
    with Member(settings.member, vllm_version=vllm_release()) as member, member.reporting():
        joined()
        say("waits for its target")
        sizes = member.meet_peer().engine_sizes
        say("loads its weights")
        # Here, not above: vLLM takes half a minute to import, and a process is to be known before that.
        from cluster.speculation.draft_rounds import serve_rounds
        from cluster.speculation.hosted import HostedSpeculator

        hosted = HostedSpeculator(settings.engine_args, sizes)
        say("negotiates")
        contract = hosted.allocate(member)
        hosted.capture()
        channel, codec = open_rounds(member, contract, hosted.table_widths, take_kv=hosted.take_kv, host=settings.host)
        with channel:
            say(f"serves rounds of epoch {member.epoch} under contract {contract.digest[:16]}")
            say(f"stops: {serve_rounds(hosted, channel, codec, epoch=member.epoch)}")


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


def end(code: int) -> NoReturn:
    """Leave at once: to unload vLLM takes seconds, and there is nothing to save."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
