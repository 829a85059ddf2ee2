"""A sweep's results as one JSON object."""

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from cluster.bench.sweep.plan import BenchPlan, Cell
from cluster.bench.sweep.summary import FAILED, INCOMPLETE, compare, summarize

BENCH_SCHEMA: Final = "dspark-cluster/bench/1"
"""Another number for any change that could break a reader."""


def document(
    plan: BenchPlan,
    runs: Sequence[tuple[Cell, Sequence[Mapping[str, Any] | None]]],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """`cells` have median and MAD (median absolute deviation) of each figure over the repeats."""
    cells = [summarize(cell.to_json(), of_cell, plan.max_spread) for cell, of_cell in runs]
    units = {cell["hardware"]["unit"] for cell in cells if cell["hardware"] is not None}
    return {
        "schema": BENCH_SCHEMA,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "unit": units.pop() if len(units) == 1 else "server",
        "random_weights": any(
            each.config is not None and each.config.model.load_format == "dummy" for each in plan.variants
        ),
        "plan": _without_folders(plan.to_json()),
        "environment": dict(environment),
        "cells": cells,
        "comparisons": compare(cells),
    }


def _without_folders(value: Any) -> Any:
    """With the last part alone of each absolute path: results are for others, too."""
    match value:
        case dict():
            return {key: _without_folders(each) for key, each in value.items()}
        case list():
            return [_without_folders(each) for each in value]
        case str() if PurePath(value).is_absolute():
            return PurePath(value).name
    return value


def is_clean(whole: Mapping[str, Any]) -> bool:
    """Whether every run of every cell has figures that can be used."""
    return all(cell["status"] not in (FAILED, INCOMPLETE) for cell in whole["cells"])
