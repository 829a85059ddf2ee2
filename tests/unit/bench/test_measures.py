"""Figures by hand: what the names of `vllm bench serve` mean."""

import numpy as np
import pytest

from cluster.bench.counters import kv_cache_tokens, read_counters, step_figures
from cluster.bench.load.overhead import bottleneck
from cluster.bench.load.records import LoadResult, Overhead, RequestRecord
from cluster.bench.measures import Goodput, acceptance_of, measure, parse_goodput
from cluster.bench.percentiles import median_absolute_deviation, percentile
from cluster.errors import UserError
from cluster.speculation.figures import AcceptanceFigures

IDLE = Overhead(cpu_share=0.1, lag_p99_s=0.001, lag_max_s=0.002, late_p99_s=0.001)


def record(
    index: int, *, ttft_s: float = 0.5, itl_s: tuple[float, ...] = (0.25, 0.25), **more: object
) -> RequestRecord:
    plain = {
        "index": index,
        "due_s": 0.0,
        "late_s": 0.0,
        "queue_s": 0.1,
        "sent_s": 0.1,
        "prompt_tokens": 10,
        "output_tokens": 5,
        "ttft_s": ttft_s,
        "e2el_s": ttft_s + sum(itl_s),
        "itl_s": itl_s,
    }
    return RequestRecord(**plain | more)  # type: ignore[arg-type]


def result(*records: RequestRecord) -> LoadResult:
    return LoadResult(duration_s=2.0, peak_concurrency=len(records), records=records, overhead=IDLE)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=101).tolist()
    for percent in (0, 50, 90, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([3.0], 99) == 3.0


def test_deviation_is_from_the_median() -> None:
    assert median_absolute_deviation([1.0, 2.0, 9.0]) == 1.0
    assert median_absolute_deviation([5.0]) == 0.0


def test_figures_of_answered_requests() -> None:
    figures = measure(result(record(0), record(1, ttft_s=1.0), record(2, error="UNAVAILABLE: gone")), None)
    assert (figures["completed"], figures["failed"], figures["max_concurrent_requests"]) == (2, 1, 3)
    assert figures["total_output_tokens"] == 10
    assert figures["output_throughput"] == 5.0
    assert figures["total_token_throughput"] == 15.0
    assert figures["request_throughput"] == 1.0
    assert figures["median_ttft_ms"] == 750
    # Five tokens, of which the first is TTFT's; they came in three messages, so between two gaps of 250 ms.
    assert figures["mean_tpot_ms"] == pytest.approx(125)
    assert figures["mean_itl_ms"] == pytest.approx(250)
    assert figures["p99_e2el_ms"] == pytest.approx(1000 + 0.99 * 500)
    assert figures["output_speed_per_user"] == pytest.approx(8)


def test_nothing_answered_has_counts_alone() -> None:
    assert measure(result(record(0, error="x")), None) == {
        "duration": 2.0,
        "completed": 0,
        "failed": 1,
        "max_concurrent_requests": 1,
    }


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    figures = measure(result(record(0, itl_s=(), output_tokens=1)), None)
    assert "mean_tpot_ms" not in figures
    assert "mean_itl_ms" not in figures


def test_goodput_counts_who_meets_every_objective() -> None:
    goodput = parse_goodput(["ttft:600", "e2el:1200"])
    assert goodput == Goodput(objectives={"ttft": 600.0, "e2el": 1200.0})
    records = record(0), record(1, ttft_s=0.7), record(2, itl_s=(1.0,))
    assert measure(result(*records), goodput)["request_goodput"] == 0.5


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "itl:5", "ttft:x", "ttft:nan"])
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="it is no objective"):
        parse_goodput([text])


def test_acceptance_is_of_all_requests_together() -> None:
    one = AcceptanceFigures(rounds=2, drafted=4, accepted_by_position=(2, 1))
    other = AcceptanceFigures(rounds=2, drafted=4, accepted_by_position=(1, 0))
    assert acceptance_of(result(record(0, acceptance=one), record(1, acceptance=other))) == one + other
    assert acceptance_of(result(record(0))) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"cpu_share": 0.9}, "busy 90% of the time"),
        ({"lag_p99_s": 0.03}, "woke 30 ms late"),
        ({"lag_p99_s": 0.009}, None),  # the operating system's
    ],
)
def test_a_busy_generator_is_the_bottleneck(changed: dict[str, float], why: str | None) -> None:
    plain = {"cpu_share": 0.1, "lag_p99_s": 0.001, "lag_max_s": 0.1, "late_p99_s": 0.1}
    found = bottleneck(Overhead(**plain | changed), 0.02, 0.25)
    assert found is None if why is None else why in (found or "")


PAGE = """\
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} STEPS
vllm:iteration_tokens_total_count{engine="0"} STEPS
vllm:iteration_tokens_total_sum{engine="0"} 900
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1
# TYPE dspark_rounds counter
dspark_rounds_total ROUNDS
# TYPE dspark_round_seconds counter
dspark_round_seconds_total{part="transfer"} TRANSFER
dspark_round_seconds_total{part="draft"} 2
# TYPE dspark_channel_bytes counter
dspark_channel_bytes_total{direction="to_draft"} 1000
dspark_channel_bytes_total{direction="to_target"} 0
# TYPE dspark_draft_lost gauge
dspark_draft_lost LOST
# TYPE dspark_draft_losses counter
dspark_draft_losses_total LOSSES
"""


def page(steps: int, rounds: int, transfer: float, *, lost: bool = False, losses: int = 0) -> str:
    page = PAGE.replace("STEPS", str(steps)).replace("ROUNDS", str(rounds)).replace("TRANSFER", str(transfer))
    return page.replace("LOST", str(int(lost))).replace("LOSSES", str(losses))


def test_a_step_is_its_parts() -> None:
    before = read_counters({"target-0": page(10, 10, 1.0), "target-1": None})
    after = read_counters({"target-0": page(30, 30, 1.5), "target-1": None})
    figures = step_figures(after.since(before), duration_s=2.0)
    assert figures["engine_steps"] == 20
    assert figures["step_ms"] == pytest.approx(100)
    assert figures["step_transfer_ms"] == pytest.approx(25)
    assert figures["step_wait_ms"] == pytest.approx(25)
    assert figures["step_target_ms"] == pytest.approx(75)
    assert figures["bytes_to_draft"] == 0


def test_a_stream_s_wait_is_no_part_of_the_target_s_own_step() -> None:
    before, after = (
        read_counters({"target-0": page(steps, steps, wait).replace('"transfer"', '"wait"')})
        for steps, wait in ((10, 1.0), (30, 1.5))
    )
    figures = step_figures(after.since(before), duration_s=2.0)
    assert figures["step_wait_ms"] == pytest.approx(25)
    assert figures["step_target_ms"] == pytest.approx(75)
    assert "step_transfer_ms" not in figures


@pytest.mark.parametrize(
    ("before", "after", "losses"),
    [
        (page(10, 10, 0.0, losses=2), page(30, 30, 0.0, losses=2), 0),
        (page(10, 10, 0.0), page(30, 20, 0.0, lost=True, losses=1), 1),
        (page(10, 10, 0.0), page(30, 20, 0.0, losses=1), 1),  # it is back
        (page(10, 10, 0.0, lost=True, losses=1), page(30, 10, 0.0, lost=True, losses=1), 1),
        (page(10, 10, 0.0, lost=True, losses=1), page(30, 20, 0.0, losses=1), 1),
    ],
)
def test_a_draft_that_was_away_is_a_loss(before: str, after: str, losses: int) -> None:
    counted = read_counters({"target-0": after}).since(read_counters({"target-0": before}))
    assert step_figures(counted, duration_s=1.0)["draft_losses"] == losses


def test_replicas_work_at_the_same_time() -> None:
    counted = read_counters({"target-0": page(10, 10, 0.0), "target-1": page(10, 10, 0.0)})
    assert step_figures(counted, duration_s=1.0)["step_ms"] == pytest.approx(100)
    assert kv_cache_tokens({"target-0": page(1, 1, 0), "target-1": page(1, 1, 0), "target-2": None}) == 3200


def test_a_replica_that_did_not_answer_spoils_the_sum() -> None:
    before = read_counters({"target-0": page(10, 10, 0.0), "target-1": None})
    after = read_counters({"target-0": page(30, 30, 0.0), "target-1": page(30, 30, 0.0)})
    assert step_figures(after.since(before), duration_s=1.0) == {}


def test_a_server_without_pages_has_no_steps() -> None:
    assert step_figures(read_counters({}), duration_s=1.0) == {}
