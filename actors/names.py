"""What the actors of a cluster are called in its Ray namespace."""

from typing import Final

import ray

from cluster.contract.facts import Role

COORDINATOR: Final = "coordinator"
GATEWAY: Final = "gateway"

HEALTH: Final = "health"
"""The concurrency group of calls that must be answered whatever else an actor does."""


def member_name(role: Role, index: int) -> str:
    """Of a replica's target or draft worker."""
    return f"{role}-{index}"


def kv_namespace() -> bytes:
    """Of what this cluster's actors keep in Ray's own key-value store, which outlives their processes."""
    return f"dspark-cluster/{ray.get_runtime_context().namespace}".encode()
