"""Why a replica's processes have no place in a cluster: plain data in, a sentence out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import Hosts
from cluster.contract.facts import Role

_OWN_LABEL = "ray.io/node-id"
"""One that each node has to itself says nothing to a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one process needs of a node. `resources` by Ray's names; `labels` are selectors."""

    role: Role
    index: int
    """Of the replica."""
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node, by what it has and what of that is free."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]

    def __str__(self) -> str:
        resources = ", ".join(
            f"{kind} {self.free.get(kind, 0):g} of {self.total.get(kind, 0):g} free" for kind in ("CPU", "GPU")
        )
        labels = ", ".join(f"{key}={value}" for key, value in self.labels.items() if key != _OWN_LABEL)
        return f"{self.name} ({resources}{'; ' if labels else ''}{labels})"


def why_not(bundles: Sequence[Bundle], hosts: Hosts, nodes: Sequence[NodeView]) -> str:
    """Why the bundles of one replica can't all be had now."""
    for bundle in bundles:
        if reason := _why_not_alone(bundle, nodes):
            return reason
    names = " and ".join(map(str, bundles))
    if hosts == "same":
        return f"no node has room for {names} together, and pools.hosts is same"
    if hosts == "different":
        return f"only one node has room for {names}, and pools.hosts is different"
    return f"each of {names} would fit alone, but not beside the other"


def _why_not_alone(bundle: Bundle, nodes: Sequence[NodeView]) -> str | None:
    labelled = [node for node in nodes if all(selects(node.labels, *label) for label in bundle.labels.items())]
    wanted = _describe(bundle)
    if not labelled:
        return f"{wanted}, and no node has these labels"
    if not any(_holds(node.total, bundle.resources) for node in labelled):
        return f"{wanted}, and no node{' with these labels' if bundle.labels else ''} has as much"
    if not any(_holds(node.free, bundle.resources) for node in labelled):
        return f"{wanted}, and what there is of it is taken"
    return None


def _describe(bundle: Bundle) -> str:
    resources = " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.resources.items())
    labels = ", ".join(f"{key}: {value}" for key, value in bundle.labels.items())
    return f"{bundle} needs {resources}{f' on a node with {labels}' if labels else ''}"


def _holds(has: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(has.get(kind, 0) >= amount for kind, amount in wanted.items())


def selects(labels: Mapping[str, str], key: str, selector: str) -> bool:
    """Whether a node with these labels is chosen by a selector as Ray reads it: `value`, `in(a, b)`, or `!` before
    either, which also chooses a node without the label."""
    wanted = selector.removeprefix("!")
    several = re.fullmatch(r"(?:in)?\((.*)\)", wanted)
    values = [value.strip() for value in several[1].split(",")] if several else [wanted]
    return (labels.get(key) in values) != selector.startswith("!")
