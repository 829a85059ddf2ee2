"""When requests are due."""

import math
import statistics
from itertools import pairwise

import pytest

from cluster.bench.load.arrivals import due_times


def due(count: int, **options: float | int | None) -> list[float]:
    given = {"rate": 10.0, "burstiness": 1.0, "concurrency": None, "ramp_up_s": 0.0, "seed": 1}
    return due_times(count, **given | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = due(20_000, burstiness=burstiness)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    # The variance of a gamma distribution by its squared mean is 1 / shape.
    assert statistics.pvariance(gaps) / statistics.fmean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_a_seed_repeats_its_times() -> None:
    assert due(50, seed=3) == due(50, seed=3)
    assert due(50, seed=3) != due(50, seed=4)


def test_an_infinite_rate_asks_for_all_at_once() -> None:
    assert due(5, rate=math.inf) == [0.0] * 5


def test_a_ramp_up_opens_places_one_after_the_other() -> None:
    assert due(6, rate=math.inf, concurrency=4, ramp_up_s=8.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 8.0]


def test_a_ramp_up_reaches_the_whole_rate_at_its_end() -> None:
    times = due(20_000, ramp_up_s=100.0)
    # A rate that grows linearly asks for half as much, in its first half for a quarter of that.
    assert sum(time < 100.0 for time in times) == pytest.approx(10 * 100 / 2, rel=0.1)
    assert sum(time < 50.0 for time in times) == pytest.approx(10 * 100 / 8, rel=0.2)
    assert sum(200.0 <= time < 300.0 for time in times) == pytest.approx(10 * 100, rel=0.1)
