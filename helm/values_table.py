"""Write the chart's README: every value with its default and its meaning, as values.schema.json and values.yaml say.

python helm/values_table.py
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parent / "dspark-cluster"
README: Final = CHART / "README.md"

_INTRODUCTION: Final = """\
# The chart's values

Made by `python helm/values_table.py` out of values.schema.json and values.yaml. How the chart is used stands in the
[README](../../README.md#kubernetes) of the whole.
"""
_SHARED: Final = "Pods of every kind have these, where they are named:"


def render() -> str:
    """The README's text."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    owners: dict[str, list[str]] = {}
    rows = [_row(path, value, default) for path, value, default in _walk(schema, values, "", owners)]
    shared = [
        (f"`{name}`", ", ".join(f"`{owner}`" for owner in owners[name]), _whole(value))
        for name, value in schema["$defs"].items()
    ]
    tables = _table(("value", "default", "meaning"), rows), _table(("value", "in", "meaning"), shared)
    return "\n".join([_INTRODUCTION, *tables[0], "", _SHARED, "", *tables[1], ""])


def _walk(
    schema: Mapping[str, Any], values: Any, path: str, owners: dict[str, list[str]]
) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Path, schema and default of each value; of shared ones `owners` is told."""
    for name, value in schema["properties"].items():
        if "$ref" in value:
            owners.setdefault(name, []).append(path.rstrip("."))
            continue
        default = values.get(name) if isinstance(values, Mapping) else None
        yield f"{path}{name}", value, default
        if "properties" in value:
            yield from _walk(value, default, f"{path}{name}.", owners)


def _row(path: str, value: Mapping[str, Any], default: Any) -> tuple[str, str, str]:
    shown = "" if default is None or "properties" in value else f"`{json.dumps(default)}`"
    return f"`{path}`", shown, _cell(value["description"])


def _whole(value: Mapping[str, Any]) -> str:
    """With its parts, which have no rows of their own."""
    parts = [f"`{name}`: {part['description']}" for name, part in value.get("properties", {}).items()]
    return _cell(" ".join([value["description"], *parts]))


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (titles, ("---",) * len(titles), *rows)]


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
