"""What a cluster is doing, asked of its actors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import ray

from actors.answers import ask_health
from actors.coordinator import PairView
from actors.draft import DraftHealth
from actors.fit import NodeView
from actors.gateway import GatewayHealth
from actors.names import COORDINATOR, GATEWAY
from actors.placement import nodes
from actors.target import ReplicaHealth
from cluster.errors import UserError
from cluster.speculation.figures import AcceptanceFigures

STATUS_SCHEMA: Final = "dspark-cluster/status/1"
"""Another number for any change that could break a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """At one moment. An actor that didn't answer is None."""

    nodes: tuple[NodeView, ...]
    gateway: GatewayHealth | None
    targets: Mapping[str, ReplicaHealth | None]
    drafts: Mapping[str, DraftHealth | None]
    pairs: tuple[PairView, ...]

    @property
    def requests(self) -> int:
        """That have ended, in all replicas."""
        return sum(target.requests for target in self.targets.values() if target is not None)

    @property
    def acceptance(self) -> AcceptanceFigures | None:
        """Of all replicas."""
        known = [target.acceptance for target in self.targets.values() if target is not None and target.acceptance]
        return sum(known[1:], known[0]) if known else None

    def to_json(self) -> str:
        """One object: `schema`, and this view's fields; the contracts as objects, null before there is one."""
        acceptance = self.acceptance
        plain = {
            "schema": STATUS_SCHEMA,
            **asdict(self),
            "pairs": [asdict(pair) | {"contract": json.loads(pair.contract or "null")} for pair in self.pairs],
            "requests": self.requests,
            "acceptance": acceptance.to_json() if acceptance is not None else None,
        }
        return json.dumps(plain)


def view() -> ClusterView:
    """The cluster in this process's Ray namespace.

    Raises:
        UserError: there is none.
    """
    names = sorted(ray.util.list_named_actors())
    if not names:
        raise UserError("no cluster", "none runs in this Ray namespace", "start one with `dspark-cluster up`")
    return ClusterView(
        nodes=tuple(nodes()),
        gateway=ask_health(GATEWAY),
        targets={name: ask_health(name) for name in names if name.startswith("target")},
        drafts={name: ask_health(name) for name in names if name.startswith("draft")},
        pairs=tuple(ask_health(COORDINATOR, "pairs") or ()),
    )
