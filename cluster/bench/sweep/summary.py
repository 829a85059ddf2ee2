"""From runs to cells, and from cells to what may be said of the arms."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cluster.bench.percentiles import median_absolute_deviation

THROUGHPUT: Final = "output_throughput_per_unit"
"""Tokens a second for each GPU, or replica: what arms are compared by, and a cell's stability is judged by."""

OK: Final = "ok"
UNSTABLE: Final = "unstable"
FAILED: Final = "failed"
INCOMPLETE: Final = "incomplete"


def summarize(cell: Mapping[str, Any], runs: Sequence[Mapping[str, Any] | None], max_spread: float) -> dict[str, Any]:
    """A cell of its runs, None for one that is missing: its status and why, and median and MAD of each figure.

    A cell that failed, or isn't complete, has no figures: it can't be compared, not even by an eye.
    """
    known = [run for run in runs if run is not None]
    good = [run for run in known if not run["why_not"]]
    status, why = OK, ""
    repeats, figures = len(good), dict[str, dict[str, float]]()
    if len(good) < len(known):
        status, why, good = FAILED, next(run["why_not"] for run in known if run["why_not"]), []
    elif len(known) < len(runs):
        status, why, good = INCOMPLETE, f"{len(known)} of {len(runs)} runs have ended", []
    else:
        names = [name for name in good[0]["figures"] if all(name in run["figures"] for run in good)]
        figures = {name: _spread([run["figures"][name] for run in good]) for name in names}
        spread = figures[THROUGHPUT]["mad"] / figures[THROUGHPUT]["median"]
        if spread > max_spread:
            status = UNSTABLE
            why = f"its throughput varies by {spread:.1%} (MAD of the median); at most {max_spread:.1%} is allowed"
    return {
        **cell,
        "status": status,
        "why": why,
        "repeats": repeats,
        "figures": figures,
        "acceptance": _acceptance(good),
        "overhead": {
            name: max(run["overhead"][name] for run in good) for name in (good[0]["overhead"] if good else ())
        },
        "cluster": good[-1]["cluster"] if good else None,
    }


def compare(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each two arms under one load, by throughput per unit, win or lose. Cells that aren't `ok` are compared with
    nothing, and those whose settings contradict each other neither."""
    usable = [cell for cell in cells if cell["status"] == OK]
    order = ("separate", "colocated", "plain")
    found = []
    for one, other in itertools.product(usable, usable):
        if one["arm"] not in order or other["arm"] not in order or one["load"] != other["load"]:
            continue
        shared = one["settings"].keys() & other["settings"].keys()
        if any(one["settings"][key] != other["settings"][key] for key in shared):
            continue
        if order.index(one["arm"]) < order.index(other["arm"]):
            found.append(_comparison(one, other))
    return found


def _comparison(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    mine, theirs = one["figures"][THROUGHPUT], other["figures"][THROUGHPUT]
    ratio = mine["median"] / theirs["median"]
    within = abs(mine["median"] - theirs["median"]) <= mine["mad"] + theirs["mad"]
    verdict = "equals" if within else "beats" if ratio > 1 else "loses to"
    settings = one["settings"] | other["settings"]
    where = ", ".join([one["load"], *(f"{key} {value}" for key, value in settings.items())])
    by = f" within the spread ({ratio - 1:+.1%})" if within else f" by {abs(ratio - 1):.1%}"
    return {
        "arm": one["arm"],
        "other": other["arm"],
        "load": one["load"],
        "settings": settings,
        "ratio": ratio,
        "verdict": verdict,
        "sentence": f"{one['arm']} {verdict} {other['arm']} at {where}{by}",
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "mad": median_absolute_deviation(values)}


def _acceptance(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Medians over the repeats; None where nothing was drafted, or where it says nothing of the models."""
    known = [run["acceptance"] for run in runs if run["acceptance"] is not None]
    if not known:
        return None
    positions = zip(*(each["acceptance_rate_by_position"] for each in known), strict=True)
    return {
        "acceptance_length": statistics.median(each["acceptance_length"] for each in known),
        "acceptance_rate": statistics.median(each["acceptance_rate"] for each in known),
        "acceptance_rate_by_position": [statistics.median(rates) for rates in positions],
    }
