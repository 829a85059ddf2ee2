"""Arms at equal GPUs, sweeps of any key, and what may be compared."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.bench.sweep import arms
from cluster.bench.sweep.arms import ArmName, Sizing, Variant, make_variant, parse_arms, parse_sizing
from cluster.bench.sweep.plan import make_variants, parse_metadata
from cluster.bench.sweep.summary import THROUGHPUT, compare, summarize
from cluster.config import ClusterConfig, load_config, parse_override
from cluster.errors import UserError

PAIR = ("model.target=t", "model.draft=d")


def config(*settings: str) -> ClusterConfig:
    return load_config(None, [parse_override(each) for each in (*PAIR, *settings)])


def variants(*sweeps: str, names: Sequence[ArmName] = arms.ARMS, sizing: Sizing = "equal") -> tuple[Variant, ...]:
    return make_variants(None, [parse_override(each) for each in PAIR], sweeps, names, sizing)


def of(arm: ArmName, *settings: str, sizing: Sizing = "equal") -> Variant:
    return make_variant(arm, config(*settings), {}, sizing)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms.profile, "is_cpu_installation", lambda: False)


@pytest.mark.usefixtures("with_gpus")
def test_arms_without_draft_workers_have_their_gpus_as_replicas() -> None:
    two_each = "pools.replicas=2"
    for arm in arms.ARMS:
        found = of(arm, two_each).hardware
        assert found is not None
        assert (found.count, found.unit) == (4, "GPU")
    assert [of(arm, two_each).config.pools.replicas for arm in arms.ARMS] == [4, 4, 2]  # type: ignore[union-attr]
    configured = of("plain", two_each, sizing="configured").hardware
    assert configured is not None
    assert configured.count == 2


@pytest.mark.usefixtures("with_gpus")
def test_a_shared_gpu_is_the_other_arms_whole_one() -> None:
    shared = ("pools.target.num_gpus=0.5", "pools.draft.num_gpus=0.5")
    plain = of("plain", *shared).config
    assert plain is not None
    assert (plain.pools.replicas, plain.pools.target.num_gpus) == (1, 1.0)


@pytest.mark.usefixtures("with_gpus")
def test_gpus_that_cannot_be_divided_are_said() -> None:
    with pytest.raises(UserError, match="can't be divided among targets"):
        of("colocated", "pools.draft.num_gpus=0.5")
    assert of("colocated", "pools.draft.num_gpus=0.5", "pools.replicas=2").config.pools.replicas == 3  # type: ignore[union-attr]


@pytest.mark.usefixtures("with_gpus")
@pytest.mark.parametrize(
    ("target", "draft", "either"),
    [
        ("{pool: target}", "{pool: draft}", {"pool": "in(target, draft)"}),
        ('{pool: "in(a, b)", zone: z}', "{pool: b, zone: z}", {"pool": "in(a, b)", "zone": "z"}),
        ("{kind: big}", "{pool: draft}", {}),
        ('{pool: "!draft"}', "{pool: draft}", {}),
    ],
)
def test_replicas_in_the_place_of_drafts_may_be_where_those_were(
    target: str, draft: str, either: dict[str, str]
) -> None:
    labels = (f"pools.target.labels={target}", f"pools.draft.labels={draft}")
    plain = of("plain", *labels).config
    assert plain is not None
    assert plain.pools.target.labels == either
    assert of("plain", *labels, sizing="configured").config.pools.target.labels == config(*labels).pools.target.labels  # type: ignore[union-attr]


def test_a_machine_without_gpus_counts_replicas() -> None:
    for arm in arms.ARMS:
        found = of(arm, "pools.replicas=2").hardware
        assert found is not None
        assert (found.count, found.unit) == (2, "replica")


def test_arms_lose_what_they_do_not_have() -> None:
    whole = (
        "pools.hosts=same",
        "channel.kind=shm",
        "model.num_speculative_tokens=3",
        "model.synthetic_acceptance_length=2.5",
        "contract.strict=true",
    )
    plain, colocated, separate = (of(arm, *whole).config for arm in arms.ARMS)
    assert plain is not None
    assert colocated is not None
    assert (plain.model.draft, plain.model.num_speculative_tokens, plain.has_draft_workers) == (None, None, False)
    assert (plain.model.synthetic_acceptance_length, colocated.model.synthetic_acceptance_length) == (None, 2.5)
    assert (colocated.model.num_speculative_tokens, colocated.has_draft_workers) == (3, False)
    assert colocated.pools.placement == "colocated"
    assert separate == config(*whole)


def test_a_sweep_runs_every_combination_and_no_cluster_twice() -> None:
    found = variants("model.num_speculative_tokens=2,4", "pools.hosts=same,any")
    assert [each.name for each in found] == [
        "plain",
        "colocated, model.num_speculative_tokens 2",
        "colocated, model.num_speculative_tokens 4",
        "separate, model.num_speculative_tokens 2, pools.hosts same",
        "separate, model.num_speculative_tokens 2, pools.hosts any",
        "separate, model.num_speculative_tokens 4, pools.hosts same",
        "separate, model.num_speculative_tokens 4, pools.hosts any",
    ]


@pytest.mark.usefixtures("with_gpus")
def test_a_sweep_of_the_ratio_has_arms_of_as_many_gpus() -> None:
    found = make_variants(
        None,
        [parse_override(each) for each in (*PAIR, "pools.replicas=2")],
        ["pools.draft.num_gpus=0.5,1"],
        ["plain", "separate"],
        "equal",
    )
    assert [(each.name, each.hardware.count) for each in found if each.hardware is not None] == [
        ("plain, pools.draft.num_gpus 0.5", 3),
        ("plain, pools.draft.num_gpus 1", 4),
        ("separate, pools.draft.num_gpus 0.5", 3),
        ("separate, pools.draft.num_gpus 1", 4),
    ]
    admitted = [each.config.gateway.limits.max_running for each in found if each.config is not None]
    assert admitted == [48, 64, 32, 32], "no arm's replicas wait for the gateway"


def test_a_target_without_a_draft_is_plain() -> None:
    (found,) = make_variants(None, [parse_override("model.target=t")], (), ["plain"], "equal")
    assert found.name == "plain"


def test_a_bench_has_a_namespace_and_a_port_of_its_own() -> None:
    (found,) = variants(names=["plain"])
    assert found.config is not None
    assert found.config.ray.namespace == "dspark-cluster-bench"
    assert found.config.gateway.port == 0


def test_what_a_user_gets_wrong() -> None:
    with pytest.raises(UserError, match="--sweep pools: it has no KEY=VALUE,VALUE"):
        variants("pools")
    with pytest.raises(UserError, match=r"pools\.replicas is 0: it must be positive"):
        variants("pools.replicas=0,1")
    with pytest.raises(UserError, match="the cluster has no draft: there is no arm separate"):
        make_variants(None, [parse_override("model.target=t")], (), ["plain", "separate"], "equal")
    with pytest.raises(UserError, match="--arm other: there is no such one; choose one of plain, colocated, separate"):
        parse_arms(["plain", "other"])
    with pytest.raises(UserError, match="--sizing big"):
        parse_sizing("big")
    with pytest.raises(UserError, match="--metadata rack"):
        parse_metadata(["rack"])


def run(throughput: float, why_not: str = "") -> dict[str, Any]:
    return {
        "why_not": why_not,
        "figures": {THROUGHPUT: throughput} if not why_not else {},
        "acceptance": None,
        "overhead": {"cpu_share": throughput / 1000},
        "cluster": None,
    }


def cell(arm: str, *throughputs: float, load: str = "concurrency 8", **settings: Any) -> dict[str, Any]:
    plain = {"name": f"{arm}, {load}", "arm": arm, "load": load, "settings": settings}
    return summarize(plain, [run(each) for each in throughputs], 0.05)


def test_a_cell_is_the_median_of_its_repeats_and_the_worst_overhead() -> None:
    found = cell("plain", 100.0, 104.0, 101.0)
    assert (found["status"], found["repeats"]) == ("ok", 3)
    assert found["figures"][THROUGHPUT] == {"median": 101.0, "mad": 1.0}
    assert found["overhead"]["cpu_share"] == 0.104


@pytest.mark.parametrize(
    ("runs", "status", "why"),
    [
        ([run(100.0), run(200.0), run(300.0)], "unstable", "varies by 50.0%"),
        ([run(100.0), run(100.0, "1 of 5 requests failed"), run(100.0)], "failed", "1 of 5 requests failed"),
        ([run(100.0), None, run(100.0)], "incomplete", "2 of 3 runs have ended"),
        ([None, None, None], "incomplete", "0 of 3 runs have ended"),
        ([run(0, "no place"), run(0, "no place"), run(0, "no place")], "failed", "no place"),
    ],
)
def test_a_cell_that_cannot_be_used_says_why_and_is_compared_with_nothing(
    runs: list[dict[str, Any] | None], status: str, why: str
) -> None:
    plain = {"name": "separate, concurrency 8", "arm": "separate", "load": "concurrency 8", "settings": {}}
    found = summarize(plain, runs, 0.05)
    assert found["status"] == status
    assert why in found["why"]
    assert compare([found, cell("plain", 100.0, 100.0, 100.0)]) == []
    json.dumps(found)


def test_losing_is_said_as_it_is() -> None:
    cells = [cell("plain", 50.0, 50.0), cell("colocated", 100.0, 100.0), cell("separate", 96.0, 96.0)]
    assert [each["sentence"] for each in compare(cells)] == [
        "colocated beats plain at concurrency 8 by 100.0%",
        "separate beats plain at concurrency 8 by 92.0%",
        "separate loses to colocated at concurrency 8 by 4.0%",
    ]


def test_a_difference_within_the_spread_is_none() -> None:
    (found,) = compare([cell("plain", 99.0, 100.0, 101.0), cell("separate", 100.0, 101.0, 102.0)])
    assert found["sentence"] == "separate equals plain at concurrency 8 within the spread (+1.0%)"


def test_only_equal_loads_and_settings_are_compared() -> None:
    cells = [
        cell("plain", 10.0),
        cell("plain", 10.0, load="concurrency 1"),
        cell("colocated", 20.0, K=2),
        cell("separate", 20.0, K=2),
        cell("separate", 30.0, K=4),
    ]
    found = [(each["arm"], each["other"], each["settings"], round(each["ratio"], 2)) for each in compare(cells)]
    assert found == [
        ("colocated", "plain", {"K": 2}, 2.0),
        ("separate", "plain", {"K": 2}, 2.0),
        ("separate", "colocated", {"K": 2}, 1.0),
        ("separate", "plain", {"K": 4}, 3.0),
    ]
