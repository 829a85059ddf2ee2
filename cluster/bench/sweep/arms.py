"""The arms: one cluster's config as plain decoding, with a colocated draft, and with a separate one, at equal GPUs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from cluster.config import ChannelConfig, ClusterConfig, PoolConfig
from cluster.contract.policy import Policy
from cluster.engine.cpu import profile
from cluster.errors import UserError

T = TypeVar("T")

ArmName = Literal["plain", "colocated", "separate", "server"]
"""`server` is one that was there: what is in it isn't known."""

ARMS: Final[tuple[ArmName, ...]] = ("plain", "colocated", "separate")

Sizing = Literal["equal", "configured"]
"""equal: every arm has as many GPUs as the separate one; configured: as many replicas."""

SIZINGS: Final[tuple[Sizing, ...]] = ("equal", "configured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What an arm's throughput is divided by: GPUs, or, where there are none, target replicas."""

    count: float
    unit: Literal["GPU", "replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One cluster to measure. `settings` are the swept keys' values, as far as the arm knows them."""

    arm: ArmName
    settings: Mapping[str, Any]
    config: ClusterConfig | None
    """None for a server that was there."""

    @property
    def name(self) -> str:
        return ", ".join([self.arm, *(f"{key} {value}" for key, value in self.settings.items())])

    @property
    def hardware(self) -> Hardware | None:
        return None if self.config is None else hardware(self.config)


def parse_arms(names: Sequence[str] | None) -> tuple[ArmName, ...]:
    """All of them where none is named. Raises UserError for another word."""
    return tuple(_one_of(name, ARMS, "--arm") for name in dict.fromkeys(names or ARMS))


def parse_sizing(word: str) -> Sizing:
    """Raises UserError for another word."""
    return _one_of(word, SIZINGS, "--sizing")


def make_variant(arm: ArmName, config: ClusterConfig, settings: Mapping[str, Any], sizing: Sizing) -> Variant:
    """The arm of a cluster whose draft is separate. What only a draft worker, or only a draft, has is left out of the
    others, and out of their `settings`.

    Raises:
        UserError: there is no draft to compare, or its GPUs can't be divided among the arm's replicas.
    """
    if config.model.draft is None and arm != "plain":
        raise UserError("the cluster has no draft", f"there is no arm {arm}", "give model.draft, or --arm plain")
    if arm == "separate":
        return Variant(arm=arm, settings=settings, config=replace(config, pools=replace(config.pools, placement=arm)))
    pools = replace(
        config.pools, hosts="any", draft=PoolConfig(), placement="colocated" if arm == "colocated" else "separate"
    )
    if sizing == "equal" and config.has_draft_workers:
        pools = replace(pools, **_equal(config))
    # It admits as much more as there are more replicas.
    gateway = config.gateway.admitting(config.gateway.limits.max_running * pools.replicas // config.pools.replicas)
    mine = replace(config, pools=pools, gateway=gateway, channel=ChannelConfig(), contract=Policy())
    foreign = ["pools.draft", "pools.hosts", "pools.placement", "channel", "contract"]
    if arm == "plain":
        no_draft: dict[str, Any] = dict.fromkeys(("draft", "num_speculative_tokens", "synthetic_acceptance_length"))
        mine = replace(mine, model=replace(mine.model, **no_draft))
        foreign.append("model")
    own = {key: value for key, value in settings.items() if not key.startswith(tuple(foreign))}
    return Variant(arm=arm, settings=own, config=mine)


def hardware(config: ClusterConfig) -> Hardware:
    """All GPUs of a cluster; without any, its target replicas."""
    pools = config.pools
    gpus = pools.replicas * (_gpus(pools.target) + (_gpus(pools.draft) if config.has_draft_workers else 0.0))
    return Hardware(count=gpus, unit="GPU") if gpus else Hardware(count=pools.replicas, unit="replica")


def _equal(config: ClusterConfig) -> dict[str, Any]:
    """Replicas and target pool with as many GPUs as the config's targets and draft workers."""
    pools = config.pools
    target, draft = _gpus(pools.target), _gpus(pools.draft)
    if target + draft <= 1:  # they share one, or there is none
        return {"target": replace(pools.target, num_gpus=target + draft)}
    replicas = pools.replicas * (target + draft) / target if target else 0.0
    if not replicas or replicas != int(replicas):
        raise UserError(
            f"{pools.replicas} targets of {target:g} GPUs with drafts of {draft:g}",
            "their GPUs can't be divided among targets without draft workers",
            "choose pools.replicas so that they can, or --sizing configured",
        )
    labels = _of_either(pools.target.labels, pools.draft.labels)
    return {"replicas": int(replicas), "target": replace(pools.target, labels=labels)}


def _of_either(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Selectors of the nodes of two pools. Ray knows of no "or" but that of a label's values: what else differs is left
    out."""
    labels = {}
    for key in one.keys() & other.keys():
        if one[key] == other[key]:
            labels[key] = one[key]
        elif not any(selector.startswith("!") for selector in (one[key], other[key])):
            values = dict.fromkeys(value for selector in (one[key], other[key]) for value in _values(selector))
            labels[key] = f"in({', '.join(values)})"
    return labels


def _values(selector: str) -> list[str]:
    several = re.fullmatch(r"(?:in)?\((.*)\)", selector)
    return [value.strip() for value in several[1].split(",")] if several else [selector]


def _one_of(word: str, known: tuple[T, ...], flag: str) -> T:
    for each in known:
        if word == each:
            return each
    raise UserError(f"{flag} {word}", "there is no such one", f"choose one of {', '.join(map(str, known))}")


def _gpus(pool: PoolConfig) -> float:
    if pool.num_gpus is None:
        return 0.0 if profile.is_cpu_installation() else 1.0
    return pool.num_gpus
