"""One run of one cell: the load, what the engines counted meanwhile, and whether the figures can be used."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cluster.bench.counters import has_lost_replica, read_counters, step_figures
from cluster.bench.load.generator import Load
from cluster.bench.load.overhead import bottleneck
from cluster.bench.load.prompts import make_requests
from cluster.bench.load.records import LoadResult, RequestRecord
from cluster.bench.measures import acceptance_of, measure, median_itl_s
from cluster.bench.sweep.plan import BenchPlan, Cell
from cluster.bench.sweep.server import BenchServer, Tell
from cluster.bench.sweep.summary import THROUGHPUT


def run_cell(server: BenchServer, plan: BenchPlan, cell: Cell, repeat: int, nonce: str, tell: Tell) -> dict[str, Any]:
    """The run as its file has it. `why_not` is empty where its figures can be used. `nonce` is of those who run no
    other with the same `cell` and `repeat`."""
    run = f"{nonce}-{cell.key}-{repeat}"
    requests, warm_ups = make_requests(plan.dataset, plan.shape, cell.concurrency, server.info, run)
    load = Load(
        requests=tuple(requests),
        request_rate=cell.request_rate,
        burstiness=plan.burstiness,
        concurrency=cell.concurrency,
        ramp_up_s=plan.ramp_up_s,
        seed=plan.shape.seed + repeat,
        request_timeout_s=plan.request_timeout_s,
    )
    if warm_ups:
        server.run(replace(load, requests=tuple(warm_ups), request_rate=math.inf, ramp_up_s=0.0), tell)
    before = server.pages()
    result = server.run(load, tell)
    after = server.pages()
    counted = read_counters(after).since(read_counters(before))
    figures = measure(result, plan.goodput)
    figures |= step_figures(counted, result.duration_s)
    acceptance = acceptance_of(result)
    if acceptance is not None:
        figures["rounds"] = acceptance.rounds
        figures["rounds_without_draft"] = sum(record.rounds_without_draft for record in result.records)
    hardware = cell.variant.hardware
    if "output_throughput" in figures:
        figures[THROUGHPUT] = figures["output_throughput"] / (1.0 if hardware is None else hardware.count)
    config = cell.variant.config
    measured = not plan.dataset.is_random and (config is None or config.model.acceptance_is_measured)
    return {
        "cell": cell.to_json(),
        "repeat": repeat,
        "why_not": _why_not(result, figures, plan.max_lag_share, lost_replica=has_lost_replica(before, after)),
        "figures": figures,
        "acceptance": acceptance.to_json() if acceptance is not None and measured else None,
        "overhead": asdict(result.overhead),
        "cluster": dict(server.facts),
        "requests": [_plain(record) for record in result.records],
    }


def absent_run(cell: Cell, repeat: int, why: str) -> dict[str, Any]:
    """A run that couldn't begin, in the place of one."""
    blank: dict[str, Any] = {"figures": {}, "acceptance": None, "overhead": {}, "cluster": None, "requests": []}
    return {"cell": cell.to_json(), "repeat": repeat, "why_not": why, **blank}


def _why_not(result: LoadResult, figures: Mapping[str, float], max_lag_share: float, *, lost_replica: bool) -> str:
    errors = Counter(record.error for record in result.records if record.error)
    if errors:
        said, _ = errors.most_common(1)[0]
        return f"{errors.total()} of {len(result.records)} requests failed ({said})"
    if lost_replica:
        return "a replica was lost, and its requests moved, or waited for it"
    if figures.get("draft_losses"):
        return "a draft was lost, and its target went on alone for a while"
    return bottleneck(result.overhead, median_itl_s(result), max_lag_share) or ""


def _plain(record: RequestRecord) -> dict[str, Any]:
    acceptance = record.acceptance
    return asdict(record) | {"acceptance": None if acceptance is None else acceptance.to_json()}
