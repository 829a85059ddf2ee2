"""One page of Prometheus figures for several processes."""

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    PlatformCollector,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.admission import Admission
from cluster.serving.federation import federated
from cluster.serving.metrics import ServiceMetrics
from cluster.serving.round_metrics import RoundCollector
from cluster.speculation.rounds import RoundReport, RoundTimes


def registry(tokens: int) -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("vllm:generation_tokens", "Tokens.", ["engine"], registry=made).labels("0").inc(tokens)
    Histogram("vllm:e2e_seconds", "Time.", registry=made, buckets=(1, 2)).observe(1.5)
    PlatformCollector(registry=made)  # whose families are the same objects each time
    return made


def page(tokens: int) -> str:
    return generate_latest(registry(tokens)).decode()


def samples(families: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_each_replicas_figures_bear_its_name() -> None:
    own = registry(1)
    sizes = set()
    for _ in range(2):  # a page that is asked for twice doesn't grow
        families = list(federated(own.collect(), {"target-0": page(3), "target-1": page(4), "target-2": None}))
        names = [family.name for family in families]
        assert len(set(names)) == len(names), "one family a name"
        found = samples(families)
        assert found["vllm:generation_tokens_total", "engine=0"] == 1
        assert found["vllm:generation_tokens_total", "engine=0", "replica=target-0"] == 3
        assert found["vllm:generation_tokens_total", "engine=0", "replica=target-1"] == 4
        assert found["vllm:e2e_seconds_bucket", "le=2.0", "replica=target-1"] == 1
        assert [found["dspark_replica_up", f"replica=target-{i}"] for i in range(3)] == [1, 1, 0]
        sizes.add(sum(len(family.samples) for family in families))
    assert len(sizes) == 1


def test_the_services_page_has_them_beside_its_own() -> None:
    metrics = ServiceMetrics(Admission(max_running=1, max_queued=0))
    assert "dspark_replica_up" not in generate_latest(metrics.registry).decode()
    asked = []
    metrics.federate(lambda: asked.append("asked") or {"target-0": page(5)})  # type: ignore[func-returns-value]
    shown = generate_latest(metrics.registry).decode()
    assert asked == ["asked"]
    assert 'vllm:generation_tokens_total{engine="0",replica="target-0"} 5.0' in shown
    assert "dspark_running_choices 0.0" in shown
    types = [line for line in shown.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    assert list(text_string_to_metric_families(shown))


def test_a_counter_of_this_process_and_of_a_replica_is_one_family() -> None:
    """As vLLM's are, where an engine is in this process, too."""
    theirs = CollectorRegistry()
    Counter("dspark_test", "Of this test.", registry=theirs).inc(3)
    own = Counter("dspark_test", "Of this test.")
    try:
        metrics = ServiceMetrics(Admission(max_running=1, max_queued=0))
        metrics.federate(lambda: {"target-0": generate_latest(theirs).decode()})
        shown = generate_latest(metrics.registry).decode()
    finally:
        REGISTRY.unregister(own)
    assert 'dspark_test_total{replica="target-0"} 3.0' in shown
    types = [line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE dspark_test")]
    assert sorted(types) == ["dspark_test_created", "dspark_test_total"]


def test_rounds_are_told_by_part() -> None:
    made = CollectorRegistry()
    times = RoundTimes(rounds=4, fuse=0.1, encode=0.2, round_trip=1.5, draft=1.0, decode=0.3, wait=0.7)
    times.request_bytes, times.reply_bytes = 1000, 50
    made.register(RoundCollector(RoundReport(times=times, epoch=3, lost=True)))
    assert made.get_sample_value("dspark_rounds_total") == 4
    seconds = {
        part: made.get_sample_value("dspark_round_seconds_total", {"part": part})
        for part in ("fuse", "encode", "transfer", "draft", "decode", "wait")
    }
    assert seconds == {"fuse": 0.1, "encode": 0.2, "transfer": 0.5, "draft": 1.0, "decode": 0.3, "wait": 0.7}
    assert made.get_sample_value("dspark_channel_bytes_total", {"direction": "to_draft"}) == 1000
    assert made.get_sample_value("dspark_channel_bytes_total", {"direction": "to_target"}) == 50
    assert made.get_sample_value("dspark_draft_lost") == 1
    assert made.get_sample_value("dspark_pairing_epoch") == 3
