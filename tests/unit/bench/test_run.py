"""One run of a cell: when its figures can be used."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.bench.load.generator import Load
from cluster.bench.load.prompts import Dataset
from cluster.bench.load.records import LoadResult, Overhead, RequestRecord
from cluster.bench.sweep.arms import Variant
from cluster.bench.sweep.plan import BenchPlan
from cluster.bench.sweep.run import run_cell
from cluster.bench.sweep.server import Tell
from tests.unit.bench.test_measures import page
from tests.unit.bench.test_prompts import INFO, SHAPE

Pages = Mapping[str, str | None]

PLAN = BenchPlan(
    variants=(Variant(arm="server", settings={}, config=None),),
    concurrencies=(1,),
    request_rates=(float("inf"),),
    repeats=3,
    dataset=Dataset(name="mine", prompts=("a", "b")),
    shape=replace(SHAPE, num_warmups=0),
    burstiness=1.0,
    ramp_up_s=0.0,
    request_timeout_s=None,
)
BEFORE, AFTER = page(100, 100, 1.0), page(150, 150, 1.5)
LOST = "a replica was lost, and its requests moved, or waited for it"


class Replicas:
    """A `BenchServer` of given pages, one before the load and one after, that answers every request."""

    info = INFO
    facts: Mapping[str, Any] = {}

    def __init__(self, *pages: Pages) -> None:
        self._pages = iter(pages)

    def pages(self) -> Pages:
        return next(self._pages)

    def run(self, load: Load, tell: Tell) -> LoadResult:
        del tell
        records = tuple(
            RequestRecord(
                index=index, due_s=0.0, late_s=0.0, queue_s=0.0, sent_s=0.0, output_tokens=2, ttft_s=0.1, e2el_s=0.2
            )
            for index, _ in enumerate(load.requests)
        )
        idle = Overhead(cpu_share=0.1, lag_p99_s=0.0, lag_max_s=0.0, late_p99_s=0.0)
        return LoadResult(duration_s=1.0, peak_concurrency=1, records=records, overhead=idle)


def why_not(before: Pages, after: Pages) -> str:
    (cell,) = PLAN.cells(PLAN.variants[0])
    run = run_cell(Replicas(before, after), PLAN, cell, 0, "nonce", lambda _: None)
    assert run["figures"]["failed"] == 0
    return str(run["why_not"])


def started(text: str, at_s: float) -> str:
    """The page of a process that began at this time."""
    return f"{text}# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {at_s}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((None, BEFORE), (AFTER, AFTER)),
        ((BEFORE, BEFORE), (AFTER, None)),
        ((BEFORE, BEFORE), (page(5, 5, 0.1), page(900, 900, 9.0))),  # what both have counted is more
        ((started(BEFORE, 1.0), BEFORE), (started(AFTER, 2.0), AFTER)),  # it has counted more since than before
    ],
)
def test_a_run_in_which_a_replica_was_lost_is_not_used(
    before: tuple[str | None, ...], after: tuple[str | None, ...]
) -> None:
    def named(pages: tuple[str | None, ...]) -> Pages:
        return {f"target-{index}": each for index, each in enumerate(pages)}

    assert why_not(named(before), named(after)) == LOST


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),  # a server whose pages can't be had
        ({"target-0": BEFORE}, {"target-0": AFTER}),
        ({"target-0": started(BEFORE, 1.0)}, {"target-0": started(AFTER, 1.0)}),
        ({"target-0": BEFORE}, {"target-0": BEFORE}),  # it wasn't asked
    ],
)
def test_a_run_with_all_its_replicas_is_used(before: Pages, after: Pages) -> None:
    assert why_not(before, after) == ""


def test_a_draft_that_came_back_is_no_lost_replica() -> None:
    before, after = page(100, 100, 1.0, lost=True, losses=1), page(150, 120, 1.5, losses=1)
    assert why_not({"target-0": before}, {"target-0": after}).startswith("a draft was lost")
