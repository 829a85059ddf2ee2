"""`python -m cluster.bench.faults`: what faults between a target and its draft cost the requests that run.

One pair in two processes, under load, and the same target without a draft, whose answers are the right ones; for two
rows that target behind the gRPC service. Each row makes one thing go wrong and compares what came of it with its bar;
the exit code is 1 where one isn't met.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Annotated, Final

import typer
from rich.table import Table

from cluster.bench import two_engines
from cluster.bench.faults.rows import Bench, Row
from cluster.bench.faults.served import Served
from cluster.channel.base import ChannelKind
from cluster.channel.faults import FaultsConfig
from cluster.commands.terminal import DebugOption, JsonOption, command, messages, output
from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.speculation.settings import DEFAULT_STALL_LIMIT_S

SCHEMA: Final = "dspark-cluster/faults/1"


@command
def main(
    target: Annotated[str, typer.Option(help="The target's folder.")],
    draft: Annotated[str, typer.Option(help="The draft's folder.")],
    requests: Annotated[int, typer.Option(min=6, help="Of a load.")] = 200,
    kills: Annotated[int, typer.Option(min=1, help="Of the draft's process.")] = 5,
    cut: Annotated[float, typer.Option(min=0.1, help="Seconds for which the network is cut.")] = 10.0,
    every: Annotated[int, typer.Option(min=2, help="One in so many messages is bad.")] = 50,
    cancels: Annotated[int, typer.Option(min=1, help="Requests that are given up.")] = 10_000,
    soak: Annotated[float, typer.Option(min=1, help="Seconds of mixed load.")] = 1800.0,
    channel: Annotated[ChannelKind, typer.Option(help="What carries a round.")] = "shm",
    only: Annotated[list[str] | None, typer.Option(help="A row by its name, once or more; default: all.")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Let a pair's draft be killed, stopped and cut off, and its messages be bad, under load."""
    two_engines.prepare()
    model = open_model(target, role="target")
    speculation = plan_speculation(model, open_model(draft, role="draft"), None)
    settings = EngineSettings(
        target=model, speculation=speculation, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=128
    )
    rows: list[Row] = []
    with (
        messages.status("loads the pair") as status,
        SeparateEngine(settings, channel=channel, stall_limit_s=DEFAULT_STALL_LIMIT_S, faults=FaultsConfig()) as pair,
        InProcessEngine(replace(settings, speculation=None)) as plain,
        ExitStack() as stack,
    ):
        status.update("runs the load without a fault")
        bench = Bench.begin(pair, plain, requests)
        served = stack.enter_context(Served(target, bench.requests, bench.expected))
        work: dict[str, Callable[[], Row]] = {
            "stopped": bench.stopped,
            "away": bench.away,
            "killed": lambda: bench.killed(kills),
            "cut": lambda: bench.cut(cut),
            "coordinator": bench.coordinator_killed,
            "bad": lambda: bench.bad_messages(every),
            "cancels": lambda: bench.cancels(cancels),
            "soak": lambda: bench.soak(soak),
            "overload": served.overload,
            "end": served.told_to_end,
        }
        if unknown := [name for name in only or () if name not in work]:
            raise UserError(f"--only {unknown[0]}", f"there are {', '.join(work)}", "name one of these")
        for name in only or work:
            status.update(f"row {name}")
            rows.append(work[name]())
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


if __name__ == "__main__":
    typer.run(main)
