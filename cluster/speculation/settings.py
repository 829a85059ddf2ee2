"""How a target's engine learns of its draft: plain data, read before torch and vLLM are imported."""

from dataclasses import dataclass
from typing import Any, Final

from cluster.channel.base import LOOPBACK, ChannelKind
from cluster.channel.faults import FaultsConfig
from cluster.contract.codec import from_plain, to_plain
from cluster.control.settings import MemberSettings

REMOTE_DRAFT: Final = "remote_draft"
"""Key of vLLM's `additional_config`: an engine that has it asks a RemoteSpeculator for its drafts."""

DEFAULT_ROUND_DEADLINE_S: Final = 30.0
"""A draft's first rounds compile its kernels, and a CPU's interpreter takes seconds for a long prompt."""


DEFAULT_STALL_LIMIT_S: Final = 0.15
"""A request shall stand still for 200 ms beyond its step at most, and a machine's own hiccups are part of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDraftSettings:
    """The value under REMOTE_DRAFT. `member` is what the target is to its coordinator."""

    member: MemberSettings
    channel: ChannelKind = "shm"
    host: str = LOOPBACK
    """This host's address, as the draft's reaches it."""
    round_deadline_s: float = DEFAULT_ROUND_DEADLINE_S
    stall_limit_s: float | None = None
    """Beyond a round as they have been, after which the target goes on alone; None waits for the deadline."""
    rest_slow_drafts: bool = False
    """Switch drafts off, for a while, at batch sizes where they cost more than they save."""
    faults: FaultsConfig | None = None
    """On purpose, for tests."""

    def to_additional_config(self) -> dict[str, Any]:
        """For vLLM's `additional_config`."""
        return {REMOTE_DRAFT: to_plain(self)}


def remote_draft_settings(additional_config: dict[str, Any]) -> RemoteDraftSettings:
    """What `to_additional_config` made."""
    return from_plain(RemoteDraftSettings, additional_config[REMOTE_DRAFT])
