"""Places for the pools: a Ray placement group for each target replica and its draft worker, all or nothing."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray._private.state import available_resources_per_node  # there is no public one by node
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.answers import answer_of
from actors.fit import Bundle, NodeView, why_not
from cluster.channel.base import ChannelKind
from cluster.config import ChannelChoice, Hosts, PoolConfig, PoolsConfig
from cluster.contract.facts import Role
from cluster.engine.cpu import profile
from cluster.errors import UserError

_STRATEGIES: Final[Mapping[Hosts, str]] = {"any": "PACK", "same": "STRICT_PACK", "different": "STRICT_SPREAD"}

_LEAVE_VISIBLE: Final = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"

_REMOVAL_TIMEOUT_S: Final = 10.0
"""For Ray to give a group's resources back; it takes milliseconds, and a command must not hang on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one process of a replica goes."""

    group: PlacementGroup
    bundle: int
    resources: Mapping[str, float]
    node_id: str
    visible_gpus: tuple[str, ...] = ()
    """The process's own, then the one that it reaches by CUDA IPC; empty: Ray shows it its own."""

    def actor_options(self) -> dict[str, Any]:
        """For an actor class's `options`, or a task's."""
        options = {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }
        if self.visible_gpus:
            # Its environment from the start, so that a restart has it, too; Ray would write over it.
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.visible_gpus), _LEAVE_VISIBLE: "1"}
            options["runtime_env"] = {"env_vars": visible}
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlaces:
    """Of a target replica and its draft worker; `draft` is None where there is no draft."""

    target: Place
    draft: Place | None

    @property
    def share_host(self) -> bool:
        return self.draft is not None and self.draft.node_id == self.target.node_id

    @property
    def have_gpus(self) -> bool:
        """Whether each process has one."""
        return self.draft is not None and all("GPU" in place.resources for place in (self.target, self.draft))

    @property
    def share_gpus(self) -> bool:
        """Whether each process has a GPU, and reaches the other's."""
        return self.draft is not None and bool(self.target.visible_gpus and self.draft.visible_gpus)

    def channel(self, choice: ChannelChoice) -> ChannelKind:
        """What carries the rounds between the two.

        Raises:
            UserError: the choice needs one host, and these are two; or a GPU for each, and there are none.
        """
        if choice == "auto":
            if not self.share_host:
                return "nccl" if self.have_gpus else "gloo"
            return "cuda_ipc" if self.share_gpus else "shm"
        if choice == "nccl" and not self.have_gpus:
            raise UserError(
                "channel.kind is nccl", "target and draft have no GPUs", "take auto, or give the pools GPUs"
            )
        if choice not in ("gloo", "nccl") and not self.share_host:
            raise UserError(
                f"channel.kind is {choice}",
                "Ray has placed target and draft on two hosts",
                "ask for pools.hosts: same, or take gloo, nccl or auto",
            )
        return choice

    def seeing_each_other(self, target_gpus: Sequence[str], draft_gpus: Sequence[str]) -> "ReplicaPlaces":
        """The same places, in which each process sees the GPUs of both, its own first."""
        assert self.draft is not None
        return replace(
            self,
            target=replace(self.target, visible_gpus=tuple(dict.fromkeys((*target_gpus, *draft_gpus)))),
            draft=replace(self.draft, visible_gpus=tuple(dict.fromkeys((*draft_gpus, *target_gpus)))),
        )


def place(
    pools: PoolsConfig,
    *,
    with_draft: bool,
    timeout_s: float,
    say: Callable[[str], None],
) -> list[ReplicaPlaces]:
    """A place for each replica of the pools, which stays until `release`. `say` is told what is waited for.

    Raises:
        UserError: in `timeout_s` seconds there was no room; names the process that didn't fit, and what the cluster
            has. No place is held then.
    """
    deadline_s = time.monotonic() + timeout_s
    places: list[ReplicaPlaces] = []
    try:
        for index in range(pools.replicas):
            bundles = _bundles(pools, index, with_draft)
            say(f"looks for a place for {' and '.join(map(str, bundles))}")
            group = _create(pools, index, bundles)
            if not group.wait(max(0.0, deadline_s - time.monotonic())):
                raise _no_room(pools, bundles, timeout_s)
            places.append(_with_gpus(_places(group, bundles)))
    except BaseException:
        release()
        raise
    return places


def release() -> None:
    """Give back the places of this Ray namespace, of whatever replicas there are."""
    groups: list[PlacementGroup] = []
    while (group := _find(_name(len(groups)))) is not None:
        groups.append(group)
        remove_placement_group(group)
    deadline_s = time.monotonic() + _REMOVAL_TIMEOUT_S
    while any(placement_group_table(group)["state"] != "REMOVED" for group in groups):
        if time.monotonic() > deadline_s:
            raise UserError(
                "the cluster's placement groups", "Ray hasn't removed them", "look with `ray status`, and try again"
            )
        time.sleep(0.02)


def nodes() -> list[NodeView]:
    """The nodes that are alive."""
    free = available_resources_per_node()
    return [
        NodeView(
            name=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _name(index: int) -> str:
    return f"replica-{index}"


def _find(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:  # Ray's answer to a name that nobody has
        return None


def _bundles(pools: PoolsConfig, index: int, with_draft: bool) -> list[Bundle]:
    roles: dict[Role, PoolConfig] = {"target": pools.target}
    if with_draft:
        roles["draft"] = pools.draft
    bundles = [
        Bundle(role=role, index=index, resources=_resources(pool), labels=pool.labels) for role, pool in roles.items()
    ]
    # Ray places one after the other and never goes back: the one with the smaller choice comes first.
    return sorted(bundles, key=lambda bundle: len(bundle.labels), reverse=True)


def _resources(pool: PoolConfig) -> dict[str, float]:
    num_gpus = pool.num_gpus
    if num_gpus is None:
        num_gpus = 0.0 if profile.is_cpu_installation() else 1.0
    return {kind: amount for kind, amount in (("CPU", pool.num_cpus), ("GPU", num_gpus)) if amount}


def _create(pools: PoolsConfig, index: int, bundles: list[Bundle]) -> PlacementGroup:
    try:
        return placement_group(
            [dict(bundle.resources) for bundle in bundles],
            strategy="STRICT_PACK" if len(bundles) == 1 else _STRATEGIES[pools.hosts],
            name=_name(index),
            lifetime="detached",  # or they would end with the command that starts the cluster
            bundle_label_selector=[dict(bundle.labels) for bundle in bundles],
        )
    except ValueError as error:
        why = " ".join(str(error).split())
        raise UserError(f"the places of {bundles[0]}", f"Ray refuses them ({why})", "change pools") from error


def _places(group: PlacementGroup, bundles: list[Bundle]) -> ReplicaPlaces:
    node_of = placement_group_table(group)["bundles_to_node_id"]
    places = {
        bundle.role: Place(group=group, bundle=number, resources=bundle.resources, node_id=node_of[number])
        for number, bundle in enumerate(bundles)
    }
    return ReplicaPlaces(target=places["target"], draft=places.get("draft"))


def _with_gpus(places: ReplicaPlaces) -> ReplicaPlaces:
    """With what the processes must see where they share a host. Which GPUs Ray has taken for a bundle, only a process
    in it is told."""
    draft = places.draft
    if draft is None or not places.share_host or not places.have_gpus:
        return places
    answers = [_own_gpus.options(**place.actor_options()).remote() for place in (places.target, draft)]
    return places.seeing_each_other(*(answer_of("a process with a GPU", answer) for answer in answers))


@ray.remote
def _own_gpus() -> list[str]:
    gpus: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return gpus


def _no_room(pools: PoolsConfig, bundles: list[Bundle], timeout_s: float) -> UserError:
    there = nodes()
    return UserError(
        f"no place for {' and '.join(map(str, bundles))} in {timeout_s:g} s",
        f"{why_not(bundles, pools.hosts, there)}; the cluster has {', '.join(map(str, there))}",
        "change pools, or add nodes to the Ray cluster",
    )
