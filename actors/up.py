"""From a config to a cluster that serves: places, coordinator, draft workers and target replicas, gateway."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import answer_of
from actors.coordinator import COORDINATOR_ACTOR, PairView
from actors.down import down
from actors.draft import DRAFT_ACTOR
from actors.gateway import GATEWAY_ACTOR
from actors.names import COORDINATOR, GATEWAY, member_name
from actors.placement import ReplicaPlaces, place, release
from actors.readiness import await_ready
from actors.target import TARGET_ACTOR
from cluster.channel.base import LOOPBACK
from cluster.config import ClusterConfig
from cluster.contract.facts import Role
from cluster.control.settings import MemberSettings
from cluster.errors import UserError
from cluster.serving.settings import ServerSettings
from cluster.speculation.settings import RemoteDraftSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What `up` made. `address` is the gateway's; `pairs` is empty without a draft."""

    address: str
    pairs: tuple[PairView, ...]


def up(config: ClusterConfig, say: Callable[[str], None]) -> Started:
    """Start the cluster in this process's Ray namespace. `say` is told of each step.

    Raises:
        UserError: there is one already, or something doesn't start; nothing of this one is left then.
    """
    if names := ray.util.list_named_actors():
        raise UserError(
            f"Ray namespace {config.ray.namespace}",
            f"there is a cluster in it ({', '.join(sorted(names))})",
            "stop it with `dspark-cluster down`, or choose another by --set ray.namespace=NAME",
        )
    settings = config.gateway.server_settings()  # its files are read before minutes of loading
    release()  # places that an `up` which was killed has left
    try:
        return _Launch(config, say).run(settings)
    except BaseException:
        say("stops what it has started")
        down(say=lambda _: None)
        raise


class _Launch:
    def __init__(self, config: ClusterConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._here = ray.get_runtime_context().get_node_id()
        self._address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def run(self, settings: ServerSettings) -> Started:
        config = self._config
        with_draft = config.has_draft_workers
        places = place(config.pools, with_draft=with_draft, timeout_s=config.ray.placement_timeout_s, say=self._say)
        coordinator = self._start_coordinator(places) if with_draft else None
        addresses = [""] * len(places)
        if coordinator is not None:
            addresses = answer_of(COORDINATOR, coordinator.addresses.remote())
        replicas, ready, ended = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for index, (where, address) in enumerate(zip(places, addresses, strict=True)):
            if where.draft is not None:
                ended[member_name("draft", index)] = self._start_draft(index, where, address).run.remote()
            name = member_name("target", index)
            replicas[name] = self._start_target(index, where, address)
            ready[name] = replicas[name].start.remote()
        await_ready(
            ready,
            ended,
            activities=lambda: _activities(coordinator),
            timeout_s=config.ray.start_timeout_s,
            say=self._say,
        )
        self._say("starts the gateway")
        served = {name: (replica, answer_of(name, ready[name])) for name, replica in replicas.items()}
        return Started(
            address=self._start_gateway(settings, served), pairs=tuple(_pairs(coordinator) if with_draft else ())
        )

    def _start_coordinator(self, places: Sequence[ReplicaPlaces]) -> Any:
        nodes = {where.node_id for each in places for where in (each.target, each.draft) if where is not None}
        host = LOOPBACK if nodes == {self._here} else self._address_of[self._here]
        actor = _named(COORDINATOR_ACTOR, COORDINATOR, scheduling_strategy=self._on_this_node())
        return actor.remote(self._config.contract, len(places), host)

    def _start_draft(self, index: int, where: ReplicaPlaces, address: str) -> Any:
        assert where.draft is not None
        member = self._member("draft", index, address)
        actor = _named(DRAFT_ACTOR, member.name, **where.draft.actor_options())
        return actor.remote(self._config, member, self._host(where, where.draft.node_id))

    def _start_target(self, index: int, where: ReplicaPlaces, address: str) -> Any:
        draft = None
        if where.draft is not None:
            draft = RemoteDraftSettings(
                member=self._member("target", index, address),
                channel=where.channel(self._config.channel.kind),
                host=self._host(where, where.target.node_id),
                round_deadline_s=self._config.channel.round_deadline_s,
                stall_limit_s=self._config.channel.stall_limit_s,
                rest_slow_drafts=self._config.channel.rest_slow_drafts,
                faults=self._config.faults,
            )
        actor = _named(TARGET_ACTOR, member_name("target", index), **where.target.actor_options())
        return actor.remote(self._config, draft)

    def _start_gateway(self, settings: ServerSettings, served: Mapping[str, Any]) -> str:
        labels = self._config.gateway.labels
        where = {"label_selector": dict(labels)} if labels else {"scheduling_strategy": self._on_this_node()}
        gateway = _named(GATEWAY_ACTOR, GATEWAY, **where).remote(settings, served)
        address: str = answer_of(GATEWAY, gateway.start.remote())
        return address

    def _member(self, role: Role, index: int, address: str) -> MemberSettings:
        timeout_s = self._config.ray.start_timeout_s
        return MemberSettings(address=address, role=role, name=member_name(role, index), start_timeout_s=timeout_s)

    def _host(self, where: ReplicaPlaces, node_id: str) -> str:
        return LOOPBACK if where.share_host else self._address_of[node_id]

    def _on_this_node(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(node_id=self._here, soft=False)


def _named(actor: Any, name: str, **options: Any) -> Any:
    # Detached: it outlives the command that starts it.
    return actor.options(name=name, lifetime="detached", **options)


def _pairs(coordinator: Any) -> list[PairView]:
    pairs: list[PairView] = answer_of(COORDINATOR, coordinator.pairs.remote())
    return pairs


def _activities(coordinator: Any) -> dict[str, str]:
    if coordinator is None:
        return {}
    return {member.name: member.activity for pair in _pairs(coordinator) for member in pair.members}
