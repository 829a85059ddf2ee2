"""Results as a sweep writes them, of made-up figures: three arms, three loads, one unstable cell and one failed."""

import json
import math
from typing import Any

from cluster.bench.load.prompts import Dataset, Shape
from cluster.bench.report.document import document
from cluster.bench.sweep.arms import ARMS
from cluster.bench.sweep.plan import BenchPlan, Cell, make_variants
from cluster.bench.sweep.summary import THROUGHPUT
from cluster.config import parse_override

SPEED = {"plain": 190.0, "colocated": 700.0, "separate": 660.0}
RATES = {"colocated": [0.9, 0.8, 0.65, 0.5], "separate": [0.9, 0.79, 0.66, 0.5]}
PARTS = {"fuse": 0.1, "encode": 0.05, "transfer": 0.2, "draft": 1.5, "decode": 0.04}


def sample(dataset: str = "mine.jsonl", *settings: str) -> dict[str, Any]:
    flags = [parse_override(each) for each in ("model.target=t", "model.draft=d", *settings)]
    shape = Shape(
        num_prompts=16,
        num_warmups=1,
        max_tokens=64,
        input_tokens=None,
        ignore_eos=False,
        temperature=0.0,
        seed=0,
        chat=None,
    )
    plan = BenchPlan(
        variants=make_variants(None, flags, (), ARMS, "equal"),
        concurrencies=(1, 8, 32),
        request_rates=(math.inf,),
        repeats=3,
        dataset=Dataset(name=dataset, prompts=("a", "<b> & 'c'")),
        shape=shape,
        burstiness=1.0,
        ramp_up_s=0.0,
        request_timeout_s=None,
        metadata={"note": "</pre><script>alert(1)</script>"},
    )
    cells = [cell for variant in plan.variants for cell in plan.cells(variant)]
    place = {"commit": "abc", "gpus": [], "cores": 2, "processor": "a processor", "versions": {"vllm": "0.32.0"}}
    runs = [(cell, [_run(cell, repeat, dataset) for repeat in range(3)]) for cell in cells]
    whole: dict[str, Any] = json.loads(json.dumps(document(plan, runs, place)))
    return whole


def _run(cell: Cell, repeat: int, dataset: str) -> dict[str, Any]:
    arm, together = cell.variant.arm, cell.concurrency or 1
    speed = SPEED[arm] / (1 + together / (16 if arm != "plain" else 40))
    if (arm, together) == ("separate", 32):
        speed *= 1 + 0.4 * repeat
    figures = {
        "completed": 16,
        "output_throughput": speed * together * (1 + repeat / 100),
        "output_speed_per_user": speed,
        "median_ttft_ms": 11.0 * together,
        "p99_ttft_ms": 15.0 * together,
        "median_tpot_ms": 1e3 / speed,
        "p99_tpot_ms": 1.2e3 / speed,
        "step_ms": 8.0 + together / 4,
        "step_target_ms": 8.0 + together / 4,
    }
    figures[THROUGHPUT] = figures["output_throughput"]
    if arm == "separate":
        figures |= {f"step_{part}_ms": took for part, took in PARTS.items()}
        figures["step_target_ms"] -= sum(PARTS.values())
        figures |= {"step_wait_ms": 1.7, "bytes_to_draft": 44_224.0, "bytes_to_target": 1_152.0}
    failed = (arm, together, repeat) == ("plain", 32, 1)
    rates = RATES.get(arm)
    return {
        "why_not": "2 of 16 requests failed (UNAVAILABLE: <gone>)" if failed else "",
        "figures": figures,
        "acceptance": None
        if rates is None or dataset == "random"
        else {
            "acceptance_length": 1 + sum(rates),
            "acceptance_rate": sum(rates) / 4,
            "acceptance_rate_by_position": rates,
        },
        "overhead": {"cpu_share": 0.05, "lag_p99_s": 0.001, "lag_max_s": 0.004, "late_p99_s": 0.002},
        "cluster": {"kv_tokens": 81_920, "target_kv_bytes": 1 << 30, "draft_kv_bytes": 1 << 28}
        if arm == "separate"
        else {"kv_tokens": 60_000},
    }
