"""Nodes that Ray is to take away, and the replicas that run on them.

Ray drains a node that an autoscaler takes back or that is preempted, on `ray drain-node`, and when its `ray start` is
sent SIGTERM. It tells nobody: who wants to know asks, as Ray's own libraries do.
"""

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ray._raylet import GcsClient  # type: ignore[attr-defined]

LEAVING_POLL_S: Final = 0.03
"""No request goes to a replica 100 ms after Ray has begun to drain its node."""

_RPC_TIMEOUT_S: Final = 5.0

_TO_MOVE_S: Final = 1.0
"""Of a node's last time, for the requests that still run there to go on elsewhere."""


def leaving_nodes(gcs: GcsClient) -> dict[str, float]:
    """The nodes that Ray drains, by id, and the seconds until each is killed, infinite where Ray wasn't told.

    Raises:
        RayError: Ray's global store doesn't answer.
    """
    now_s = time.time()
    deadlines_ms: dict[str, int] = gcs.get_draining_nodes(timeout=_RPC_TIMEOUT_S)
    return {node: ms / 1e3 - now_s if ms else math.inf for node, ms in deadlines_ms.items()}


class DrainedReplicas:
    """Which replicas are drained, which are to be, for their nodes' sake, and which can be used again. Knows nothing of
    Ray."""

    def __init__(self, node_of: Mapping[str, str] = MappingProxyType({})) -> None:
        """`node_of` is what an earlier one had."""
        self._node_of = dict(node_of)

    @property
    def node_of(self) -> Mapping[str, str]:
        """Where each of the drained replicas was; empty where that isn't known."""
        return MappingProxyType(self._node_of)

    def add(self, replica: str, node: str) -> None:
        """It is drained; that node, if one is known, is where it was."""
        self._node_of[replica] = node or self._node_of.get(replica, "")

    def to_drain(self, leaving: Mapping[str, float], node_of: Mapping[str, str], grace_s: float) -> dict[str, float]:
        """The replicas that leave with their nodes and aren't drained yet, with the grace period of each."""
        return {
            replica: min(grace_s, max(0.0, leaving[node] - _TO_MOVE_S))
            for replica, node in node_of.items()
            if node in leaving and self._node_of.get(replica) != node
        }

    def take_returned(self, leaving: Mapping[str, float], node_of: Mapping[str, str]) -> list[str]:
        """The drained replicas that Ray has started again on another node, which is to stay; each once."""
        returned = [
            replica
            for replica, node in self._node_of.items()
            if node and node_of[replica] not in (node, "") and node_of[replica] not in leaving
        ]
        for replica in returned:
            del self._node_of[replica]
        return returned
