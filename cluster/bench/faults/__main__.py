"""`python -m cluster.bench.faults`: what faults between a target and its draft cost the requests that run.

One pair in two processes, under load, and the same target without a draft, whose answers are the right ones; for two
rows that target behind the gRPC service. Each row makes one thing go wrong and compares what came of it with its bar;
the exit code is 1 where one isn't met.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import typer

from cluster.bench import two_engines
from cluster.bench.faults.figures import Row
from cluster.bench.faults.report import run_rows
from cluster.bench.faults.rows import Bench
from cluster.bench.faults.served import Served
from cluster.channel.base import ChannelKind
from cluster.channel.faults import FaultsConfig
from cluster.commands.terminal import DebugOption, JsonOption, command, messages
from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.speculation.settings import DEFAULT_STALL_LIMIT_S


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
        run_rows(work, only, status.update, json_output=json_output)


if __name__ == "__main__":
    typer.run(main)
