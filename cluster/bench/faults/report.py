"""What came of the rows, for people and for programs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

import typer
from rich.table import Table

from cluster.bench.faults.figures import Row
from cluster.commands.terminal import messages, output
from cluster.errors import UserError

SCHEMA: Final = "dspark-cluster/faults/1"


def run_rows(
    work: Mapping[str, Callable[[], Row]], only: Sequence[str] | None, say: Callable[[str], None], *, json_output: bool
) -> None:
    """Run those named `only`, or all, in the order of `work`, and print what came of each. Exits with 1 where a bar
    isn't met.

    Raises:
        UserError: `only` has a name that no row has; none has run then.
    """
    if unknown := [name for name in only or () if name not in work]:
        raise UserError(f"--only {unknown[0]}", f"there are {', '.join(work)}", "name one of these")
    rows: list[Row] = []
    for name, run in work.items():
        if only and name not in only:
            continue
        say(f"row {name}")
        rows.append(run())
        messages.print(_line(rows[-1]), soft_wrap=True)
    if json_output:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) | {"is_met": row.is_met} for row in rows]}))
    else:
        output().print(_table(rows))
    if not all(row.is_met for row in rows):
        raise typer.Exit(1)


def _line(row: Row) -> str:
    figures = ", ".join(f"{figure.name} {figure.value}" for figure in row.figures)
    return f"{row.fault}: {figures}{'' if row.is_met else ' (bar not met)'}"


def _table(rows: Sequence[Row]) -> Table:
    table = Table("fault", "requests", "measured", "bar")
    for row in rows:
        figures = "\n".join(f"{figure.name}: {figure.value}" for figure in row.figures)
        table.add_row(row.fault, f"{row.requests:,}", figures, "met" if row.is_met else "not met")
    return table
