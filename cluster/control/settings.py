"""How a coordinator and its members are set up: plain data, so that it can cross to a process that isn't there yet."""

from dataclasses import dataclass
from typing import Final

from cluster.contract.errors import require_positive
from cluster.contract.facts import Role
from cluster.contract.policy import Policy

DEFAULT_START_TIMEOUT_S: Final = 600.0
"""A peer may be reading weights of hundreds of gigabytes. vLLM waits as long for an engine's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """`address` is gRPC's: `unix:PATH`, or a host and port. There is no authentication: keep it on this host, or in a
    network of the cluster's own."""

    address: str
    policy: Policy
    heartbeat_interval_ms: int = 1_000
    heartbeat_timeout_ms: int = 15_000
    """A member on a busy machine may not get to its heartbeat while a library loads; a process that has ended breaks
    its stream, and is noticed at once."""

    def __post_init__(self) -> None:
        require_positive(
            heartbeat_interval_ms=self.heartbeat_interval_ms, heartbeat_timeout_ms=self.heartbeat_timeout_ms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    address: str
    role: Role
    name: str
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    """For each thing that a member waits for until the pair serves."""
