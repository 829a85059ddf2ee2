"""What a sweep runs: every arm with every setting, under every load."""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cluster.bench.load.prompts import Dataset, Shape
from cluster.bench.measures import Goodput
from cluster.bench.sweep.arms import ArmName, Sizing, Variant, make_variant
from cluster.config import ClusterConfig, Override, load_config, parse_override
from cluster.contract.codec import to_plain
from cluster.errors import UserError

PLAN_SCHEMA: Final = "dspark-cluster/bench-plan/1"
"""Another number for any change that makes earlier runs another plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One variant under one load; it is run several times. `request_rate` is infinite for all at once."""

    variant: Variant
    concurrency: int | None
    request_rate: float

    @property
    def load(self) -> str:
        """For people."""
        parts = [f"concurrency {self.concurrency}"] if self.concurrency is not None else []
        if not math.isinf(self.request_rate):
            parts.append(f"{self.request_rate:g} requests/s")
        return ", ".join(parts) or "all at once"

    @property
    def name(self) -> str:
        return f"{self.variant.name}, {self.load}"

    def to_json(self) -> dict[str, Any]:
        """An infinite rate is null."""
        hardware, config = self.variant.hardware, self.variant.config
        return {
            "name": self.name,
            "arm": self.variant.arm,
            "settings": dict(self.variant.settings),
            "load": self.load,
            "concurrency": self.concurrency,
            "request_rate": None if math.isinf(self.request_rate) else self.request_rate,
            "hardware": None if hardware is None else asdict(hardware),
            "synthetic_acceptance_length": None if config is None else config.model.synthetic_acceptance_length,
        }

    @property
    def key(self) -> str:
        """Names its files: short, and the same in every run of the plan."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The whole sweep. Lists are in the order in which they run."""

    variants: tuple[Variant, ...]
    concurrencies: tuple[int | None, ...]
    request_rates: tuple[float, ...]
    repeats: int
    dataset: Dataset
    shape: Shape
    burstiness: float
    ramp_up_s: float
    request_timeout_s: float | None
    goodput: Goodput | None = None
    max_spread: float = 0.05
    """Of a cell's throughput: the median absolute deviation of its repeats, as a share of their median."""
    max_lag_share: float = 0.25
    """Of the median gap between messages: a generator that wakes later than this was the bottleneck."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    """Of a server that was there; None for clusters, which their configs say."""
    model: str | None = None
    """As that server names it; None until it has been asked."""

    def cells(self, variant: Variant) -> Iterator[Cell]:
        for concurrency, rate in itertools.product(self.concurrencies, self.request_rates):
            yield Cell(variant=variant, concurrency=concurrency, request_rate=rate)

    @property
    def num_runs(self) -> int:
        return len(self.variants) * len(self.concurrencies) * len(self.request_rates) * self.repeats

    def to_json(self) -> dict[str, Any]:
        """Everything that another plan would differ in; prompts as their digest."""
        return {
            "schema": PLAN_SCHEMA,
            "variants": [{"name": each.name, "config": to_plain(each.config)} for each in self.variants],
            "concurrencies": list(self.concurrencies),
            "request_rates": [None if math.isinf(rate) else rate for rate in self.request_rates],
            "repeats": self.repeats,
            "dataset": {
                "name": self.dataset.name,
                "prompts": len(self.dataset.prompts) or None,
                "sha256": self.dataset.digest,
            },
            **asdict(self.shape),
            "burstiness": self.burstiness,
            "ramp_up_s": self.ramp_up_s,
            "request_timeout_s": self.request_timeout_s,
            "goodput_ms": None if self.goodput is None else dict(self.goodput.objectives),
            "max_spread": self.max_spread,
            "max_lag_share": self.max_lag_share,
            "metadata": dict(self.metadata),
            "address": self.address,
            "model": self.model,
        }


def make_variants(
    file: Path | None, flags: Sequence[Override], sweeps: Sequence[str], arms: Sequence[ArmName], sizing: Sizing
) -> tuple[Variant, ...]:
    """Every arm for every combination of the swept values, each cluster once.

    A sweep is `KEY=VALUE,VALUE,...`, the key one of the cluster's config. Raises UserError for what can't be.
    """
    variants: dict[str, tuple[Variant, dict[str, Any]]] = {}
    choices = list(itertools.product(*map(_values, sweeps)))
    for arm, chosen in itertools.product(arms, choices):
        settings = {override.path: override.value for override in chosen}
        config = of_its_own(load_config(file, [*flags, *chosen]))
        variant = make_variant(arm, config, settings, sizing)
        variants.setdefault(json.dumps([arm, to_plain(variant.config)], sort_keys=True), (variant, settings))
    names = Counter(variant.name for variant, _ in variants.values())
    # A setting that an arm doesn't have may still decide how many GPUs are equal.
    return tuple(
        variant if names[variant.name] == 1 else replace(variant, settings=settings)
        for variant, settings in variants.values()
    )


def of_its_own(config: ClusterConfig) -> ClusterConfig:
    """In a Ray namespace where no other cluster is, on any free port."""
    return replace(
        config,
        gateway=replace(config.gateway, port=0, metrics_port=None),
        ray=replace(config.ray, namespace=f"{config.ray.namespace}-bench"),
    )


def parse_metadata(texts: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` each. Raises UserError for another form."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--metadata {text}", "it has no KEY=VALUE", "write, for example, --metadata rack=7")
        pairs[key] = value
    return pairs


def _values(sweep: str) -> list[Override]:
    key, equals, values = sweep.partition("=")
    if not equals or not all(value.strip() for value in values.split(",")):
        raise UserError(
            f"--sweep {sweep}",
            "it has no KEY=VALUE,VALUE",
            "write, for example, --sweep model.num_speculative_tokens=2,4",
        )
    return [parse_override(f"{key}={value}") for value in values.split(",")]
