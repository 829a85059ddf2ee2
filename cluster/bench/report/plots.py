"""The report's plots, of cells as `results.json` has them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cluster.bench.report.svg import Scale, element, figure, shown, text, tooltip
from cluster.bench.sweep.summary import THROUGHPUT, UNSTABLE

Cell = Mapping[str, Any]

STEP_PARTS: Final = ("target", "fuse", "encode", "transfer", "draft", "decode", "wait")
"""The last is transfer and draft, where these aren't told apart."""

# Pixels, as most pages show them: two small plots side by side, or a wide one.
_WIDTH: Final = 480
_HEIGHT: Final = 320
_LEFT: Final = 64
_RIGHT: Final = 24
_TOP: Final = 16
_BOTTOM: Final = 48
_ROW: Final = 34
_WIDE: Final = 1040
_EDGE: Final = 8
"""Beside a row's bar, which needs no axis."""


def variant_name(cell: Cell) -> str:
    """The arm and its settings, whatever the load."""
    return ", ".join([cell["arm"], *(f"{key} {value}" for key, value in cell["settings"].items())])


def pareto(cells: Sequence[Cell], unit: str) -> str:
    """Tokens/s per user against tokens/s per GPU: a line for each variant, a point for each load."""
    drawn = [cell for cell in cells if {"output_speed_per_user", THROUGHPUT} <= cell["figures"].keys()]
    if not drawn:
        return ""
    across = Scale.over([_median(cell, "output_speed_per_user") for cell in drawn], _LEFT, _WIDTH - _RIGHT)
    up = Scale.over([_median(cell, THROUGHPUT) for cell in drawn], _HEIGHT - _BOTTOM, _TOP)
    parts = _axes(across, up, "tokens/s per user (1 / median TPOT)", f"output tokens/s per {unit}")
    for name in dict.fromkeys(map(variant_name, drawn)):
        own = sorted(
            (cell for cell in drawn if variant_name(cell) == name),
            key=lambda cell: -_median(cell, "output_speed_per_user"),
        )
        places = [(across(_median(cell, "output_speed_per_user")), up(_median(cell, THROUGHPUT))) for cell in own]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(element("polyline", points=line, class_=f"line arm-{own[0]['arm']}"))
        for cell, (x, y) in zip(own, places, strict=True):
            kind = "open" if cell["status"] == UNSTABLE else "full"
            said = (
                f"{cell['name']}: {shown(_median(cell, 'output_speed_per_user'))} tokens/s per user, "
                f"{shown(_median(cell, THROUGHPUT))} tokens/s per {unit}"
            )
            parts.append(element("circle", tooltip(said), cx=x, cy=y, r=5, class_=f"point {kind} arm-{cell['arm']}"))
            parts.append(text(_short_load(cell), x + 8, y - 7, class_=f"mark arm-{cell['arm']}"))
    return figure(_WIDTH, _HEIGHT, "Tokens per second per user against throughput", parts)


def steps(cells: Sequence[Cell]) -> str:
    """An average engine step of each cell, by part."""
    drawn = [cell for cell in cells if "step_ms" in cell["figures"]]
    if not drawn:
        return ""
    height = _ROW * len(drawn) + _TOP + _BOTTOM
    across = Scale.over([_median(cell, "step_ms") for cell in drawn], _EDGE, _WIDE - 96)
    parts = [
        element("line", x1=across(tick), x2=across(tick), y1=_TOP, y2=height - _BOTTOM, class_="grid")
        + text(shown(tick), across(tick), height - _BOTTOM + 18, text_anchor="middle", class_="tick")
        for tick in across.ticks
    ]
    parts.append(text("ms a step", _WIDE / 2, height - 8, text_anchor="middle", class_="axis"))
    for row, cell in enumerate(drawn):
        y, x = _TOP + row * _ROW, across(0)
        parts.append(text(cell["name"], _EDGE, y + 11, class_="mark"))
        for part in STEP_PARTS if "step_transfer_ms" not in cell["figures"] else STEP_PARTS[:-1]:
            if f"step_{part}_ms" in cell["figures"]:
                milliseconds = _median(cell, f"step_{part}_ms")
                width = across(max(0.0, milliseconds)) - across(0)
                said = f"{cell['name']}: {part} {shown(milliseconds)} ms"
                parts.append(
                    element("rect", tooltip(said), x=x, y=y + 16, width=width, height=13, class_=f"part-{part}")
                )
                x += width
        parts.append(text(f"{shown(_median(cell, 'step_ms'))} ms", x + 6, y + 27, class_="mark"))
    return figure(_WIDE, height, "An average engine step by part", parts)


def acceptance(cells: Sequence[Cell]) -> str:
    """The share of rounds that accept the draft at each position, once for each variant."""
    drawn = _first_of_each_variant(cells)
    if not drawn:
        return ""
    positions = max(len(cell["acceptance"]["acceptance_rate_by_position"]) for cell in drawn)
    across = Scale(most=float(positions), start=_LEFT, end=_WIDTH - _RIGHT)
    up = Scale(most=100.0, start=_HEIGHT - _BOTTOM, end=_TOP)
    parts = _axes(across, up, "position in the draft", "% of rounds that accept it", whole=True)
    for number, cell in enumerate(drawn):
        rates = cell["acceptance"]["acceptance_rate_by_position"]
        places = [(across(position), up(100 * rate)) for position, rate in enumerate(rates, 1)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashed = " dashed" if number else ""  # two arms that accept the same lie on each other
        parts.append(element("polyline", points=line, class_=f"line arm-{cell['arm']}{dashed}"))
        for position, (x, y) in enumerate(places, 1):
            said = f"{cell['name']}: position {position}, {rates[position - 1]:.1%}"
            parts.append(element("circle", tooltip(said), cx=x, cy=y, r=5, class_=f"point full arm-{cell['arm']}"))
    return figure(_WIDTH, _HEIGHT, "Acceptance rate by position", parts)


def _first_of_each_variant(cells: Sequence[Cell]) -> list[Cell]:
    first: dict[str, Cell] = {}
    for cell in cells:
        if cell["acceptance"] is not None:
            first.setdefault(variant_name(cell), cell)
    return list(first.values())


def _axes(across: Scale, up: Scale, below: str, beside: str, *, whole: bool = False) -> list[str]:
    parts = []
    for tick in up.ticks:
        parts.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=up(tick), y2=up(tick), class_="grid"))
        parts.append(text(shown(tick), _LEFT - 8, up(tick) + 4, text_anchor="end", class_="tick"))
    for tick in across.ticks:
        if not whole or tick == int(tick):
            parts.append(text(shown(tick), across(tick), _HEIGHT - _BOTTOM + 18, text_anchor="middle", class_="tick"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(text(below, (_LEFT + _WIDTH) / 2, _HEIGHT - 8, text_anchor="middle", class_="axis"))
    parts.append(
        text(beside, 14, middle, text_anchor="middle", transform=f"rotate(-90 14 {middle:.1f})", class_="axis")
    )
    return parts


def _short_load(cell: Cell) -> str:
    if cell["request_rate"] is not None:
        return f"{cell['request_rate']:g}/s"
    return "all" if cell["concurrency"] is None else str(cell["concurrency"])


def _median(cell: Cell, name: str) -> float:
    median: float = cell["figures"][name]["median"]
    return median
