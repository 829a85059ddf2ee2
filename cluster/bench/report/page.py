"""A sweep's results as one HTML page that needs nothing else: no script, no font, no network."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from cluster.bench.measures import LATENCIES
from cluster.bench.report.plots import STEP_PARTS, Cell, acceptance, pareto, steps
from cluster.bench.report.style import STYLE
from cluster.bench.report.svg import shown
from cluster.bench.sweep.summary import THROUGHPUT
from cluster.contract.codec import to_text
from cluster.contract.memory import binary_size

_LATENCY_COLUMNS: Final = tuple(
    (f"{kind}_{latency}_ms", f"{kind.replace('median', 'p50')} {latency.upper()}")
    for latency in LATENCIES
    for kind in ("median", "p99")
)
_STEP_COLUMNS: Final = (
    ("step_ms", "step ms"),
    *((f"step_{part}_ms", part) for part in STEP_PARTS),
    ("bytes_to_draft", "bytes out"),
    ("bytes_to_target", "bytes back"),
    ("rounds_without_draft", "rounds without draft"),
    ("preemptions", "preemptions"),
)


def page(whole: Mapping[str, Any]) -> str:
    """Of what `results.json` has. Each figure's cell has its path there (`data-path`), and its value (`data-value`)."""
    unit = whole["unit"]
    parts = [
        f"<h1>{escape(_title(whole))}</h1>",
        f'<p class="faint">{escape(_subtitle(whole))}</p>',
        _findings(whole),
        _plots(whole["cells"], unit),
        "<h2>Throughput</h2>",
        _table(
            whole["cells"],
            (
                (THROUGHPUT, f"tokens/s per {unit}"),
                ("output_throughput", "tokens/s"),
                ("output_speed_per_user", "tokens/s per user"),
                ("request_throughput", "requests/s"),
                ("request_goodput", "goodput, requests/s"),
                ("max_concurrent_requests", "peak concurrency"),
                ("completed", "answered"),
            ),
            first=True,
        ),
        f"<h2>Latency</h2>{_faint('Milliseconds, by the names of vllm bench serve.')}",
        _table(whole["cells"], _LATENCY_COLUMNS),
        "<h2>An average engine step</h2>",
        _faint(
            "Milliseconds and bytes. wait is transfer and draft: the target waits for both. target is the rest of the "
            "step: the model, scheduling, a colocated draft, and idle time where requests don't wait."
        ),
        _table(whole["cells"], _STEP_COLUMNS),
        "<h2>Speculation</h2>",
        _speculation(whole),
        "<h2>The load generator</h2>",
        _faint("Its own effort, the worst of a cell's repeats. A run in which it was the bottleneck has failed."),
        _generator(whole["cells"]),
        "<h2>Memory</h2>",
        _memory(whole["cells"]),
        _details("Environment", whole["environment"]),
        _details("Load and configs", whole["plan"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(_title(whole))}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _title(whole: Mapping[str, Any]) -> str:
    arms = list(dict.fromkeys(cell["arm"] for cell in whole["cells"]))
    return f"dspark-cluster bench: {', '.join(arms)}"


def _subtitle(whole: Mapping[str, Any]) -> str:
    plan, place = whole["plan"], whole["environment"]
    counted = {"GPU": "figures per GPU", "replica": "no GPU: figures per target replica, all arms on the same cores"}
    return "; ".join(
        [
            f"{plan['num_prompts']} prompts of {plan['dataset']['name']}, up to {plan['max_tokens']} tokens each, "
            f"{plan['repeats']} repeats, medians ± MAD",
            *(["random weights"] if whole["random_weights"] else []),
            counted.get(whole["unit"], "one server"),
            place["gpus"][0] if place["gpus"] else f"{place['cores']} cores of {place['processor']}",
            f"commit {place['commit'] or 'unknown'}",
            whole["time"],
        ]
    )


def _findings(whole: Mapping[str, Any]) -> str:
    said = [escape(each["sentence"]) for each in whole["comparisons"]]
    said += [
        f'<span class="status-{cell["status"]}">{escape(cell["status"])}</span>: {escape(cell["name"])}: '
        f"{escape(cell['why'])}"
        for cell in whole["cells"]
        if cell["why"]
    ]
    said = said or ["There are no two arms to compare."]
    items = "".join(f"<li>{each}</li>" for each in said)
    return f'<h2>Findings</h2><div class="card"><ul class="findings">{items}</ul></div>'


def _plots(cells: Sequence[Cell], unit: str) -> str:
    arms = list(dict.fromkeys(cell["arm"] for cell in cells))
    arm_legend = _legend((arm, f"--{arm}") for arm in arms)
    drafting = [arm for arm in arms if any(cell["arm"] == arm and cell["acceptance"] for cell in cells)]
    draft_legend = _legend((arm, f"--{arm}") for arm in drafting)
    part_legend = _legend((part, f"--{part}") for part in STEP_PARTS)
    cards = (
        (
            "Speed per user against throughput",
            "Up and right is better. Numbers are the load; open points are unstable.",
            arm_legend,
            pareto(cells, unit),
        ),
        ("Acceptance by position", "Of the drafts that the target verified.", draft_legend, acceptance(cells)),
        ("An average engine step", "Where its time goes.", part_legend, steps(cells)),
    )
    shown_cards = "".join(
        f'<div class="card"><h3>{title}</h3><p class="faint">{said}</p>{legend}{plot}</div>'
        for title, said, legend, plot in cards
        if plot
    )
    return f'<h2>Plots</h2><div class="grid2">{shown_cards}</div>'


def _legend(items: Any) -> str:
    spans = "".join(f'<span><i style="background:var({color})"></i>{escape(name)}</span>' for name, color in items)
    return f'<div class="legend">{spans}</div>'


def _table(cells: Sequence[Cell], columns: Sequence[tuple[str, str]], *, first: bool = False) -> str:
    """Columns that no cell has are left out. The `first` table says how each cell stands."""
    columns = [column for column in columns if any(column[0] in cell["figures"] for cell in cells)]
    rows = []
    for index, cell in enumerate(cells):
        row = [f"<td>{escape(cell['name'])}</td>"]
        if first:
            row.append(f'<td class="status-{cell["status"]}">{cell["status"]}</td>')
        for name, _ in columns:
            spread = cell["figures"].get(name)
            row.append("<td></td>" if spread is None else _figure(f"cells.{index}.figures.{name}.median", **spread))
        rows.append(row)
    return _html_table(["", *(["status"] if first else []), *(title for _, title in columns)], rows)


def _figure(path: str, median: float, mad: float | None = None) -> str:
    spread = f" <small>± {shown(mad)}</small>" if mad else ""
    return f'<td data-path="{path}" data-value="{median!r}">{shown(median)}{spread}</td>'


def _speculation(whole: Mapping[str, Any]) -> str:
    if synthetic := _synthetic(whole["cells"]):
        return synthetic
    if whole["plan"]["dataset"]["name"] == "random":
        return _faint("The prompts are random tokens: acceptance on them says nothing, so none is given.")
    if whole["random_weights"]:
        return _faint("The weights are random: acceptance of them says nothing, so none is given.")
    rows = []
    for index, cell in enumerate(whole["cells"]):
        if (accepted := cell["acceptance"]) is not None:
            path = f"cells.{index}.acceptance"
            rates = accepted["acceptance_rate_by_position"]
            row = [f"<td>{escape(cell['name'])}</td>"]
            row += [_figure(f"{path}.{name}", accepted[name]) for name in ("acceptance_length", "acceptance_rate")]
            row += [_figure(f"{path}.acceptance_rate_by_position.{place}", rate) for place, rate in enumerate(rates)]
            rows.append(row)
    if not rows:
        return _faint("Nothing was drafted.")
    positions = max(map(len, rows)) - 3
    titles = ["", "acceptance length", "acceptance rate", *(f"position {place + 1}" for place in range(positions))]
    return _html_table(titles, [row + ["<td></td>"] * (len(titles) - len(row)) for row in rows])


def _synthetic(cells: Sequence[Cell]) -> str:
    """Empty where every draft is judged by its target."""
    name = "synthetic_acceptance_length"
    rows = [
        [f"<td>{escape(cell['name'])}</td>", _figure(f"cells.{index}.{name}", cell[name])]
        for index, cell in enumerate(cells)
        if cell[name] is not None
    ]
    said = (
        "Acceptance is synthetic: by chance a round has so many tokens on average, the target's own included, whatever "
        "was drafted. Nothing was measured of it."
    )
    return _faint(said) + _html_table(["", "synthetic acceptance length"], rows) if rows else ""


def _generator(cells: Sequence[Cell]) -> str:
    names = ("cpu_share", "lag_p99_s", "lag_max_s", "late_p99_s")
    rows = [
        [f"<td>{escape(cell['name'])}</td>"]
        + [_figure(f"cells.{index}.overhead.{name}", cell["overhead"][name]) for name in names]
        for index, cell in enumerate(cells)
        if cell["overhead"]
    ]
    titles = ["", "share of a core", "late wake-ups p99, s", "latest, s", "requests noticed late p99, s"]
    return _html_table(titles, rows)


def _memory(cells: Sequence[Cell]) -> str:
    """Once for each variant: the load changes nothing of it."""
    rows: dict[str, list[str]] = {}
    for cell in cells:
        facts = cell["cluster"] or {}
        if "kv_tokens" in facts:
            sizes = [facts.get("target_kv_bytes"), facts.get("draft_kv_bytes")]
            shown_sizes = [f"<td>{binary_size(size) if size else ''}</td>" for size in sizes]
            name = cell["name"].removesuffix(f", {cell['load']}")
            rows.setdefault(name, [f"<td>{escape(name)}</td>", f"<td>{facts['kv_tokens']:,}</td>", *shown_sizes])
    if not rows:
        return _faint("Not known of this server.")
    titles = ["", "KV tokens, all replicas", "target's KV, each", "draft worker's KV, each"]
    return _html_table(titles, list(rows.values()))


def _html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _details(title: str, plain: Mapping[str, Any]) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(to_text(plain))}</pre></details>"


def _faint(said: str) -> str:
    return f'<p class="faint">{said}</p>'
