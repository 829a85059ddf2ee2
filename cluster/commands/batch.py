"""`dspark-cluster batch`: every line of a file answered by a server, into another file."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from cluster.batch.check import check_input
from cluster.batch.lines import BatchInput, read_input
from cluster.batch.output import BatchOutput
from cluster.batch.run import BatchRun, RunOptions
from cluster.batch.tally import Tally
from cluster.client import AsyncClient, GenerationError
from cluster.commands.generate_remote import INFO_TIMEOUT_S, RemoteOptions, user_error
from cluster.commands.progress import showing_progress
from cluster.commands.terminal import messages

EXIT_INCOMPLETE: Final = 1
EXIT_INTERRUPTED: Final = 130
"""As a shell reports the end by Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """`defaults` are for fields that a line leaves out; `concurrency` None is as many as the server runs at once."""

    input: Path
    output: Path
    defaults: Mapping[str, Any]
    patience_s: float
    concurrency: int | None = None
    request_timeout_s: float | None = None


def batch(options: BatchOptions, server: Callable[[], AbstractContextManager[RemoteOptions]]) -> None:
    """Answer what has no answer yet. `server` is opened for that alone, once input and output are right.

    Exit code 0: every line has its answer; 1: some have not, and the command can be repeated; 130: interrupted,
    likewise. Raises UserError before a request is sent for what is wrong with input, output or server.
    """
    with messages.status(f"reads {options.input}"):
        whole = read_input(options.input, options.defaults)
    interrupted = False
    with BatchOutput(options.output, whole, options.defaults) as output:
        tally = Tally(total=len(whole.lines), before=len(output.done))
        if tally.before:
            messages.print(f"{tally.before:,} of {tally.total:,} lines have their answers from before")
        if not tally.complete:
            with server() as remote:
                interrupted = answer_missing(remote, options, whole, output, tally)
    _summarize(tally, options.output)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not tally.complete:
        raise typer.Exit(EXIT_INCOMPLETE)


def answer_missing(
    remote: RemoteOptions, options: BatchOptions, whole: BatchInput, output: BatchOutput, tally: Tally
) -> bool:
    """Answer the lines that have no answer in `output`, with progress; whether a signal ended it.

    Raises UserError for a server that can't be asked, and for a line that it would refuse.
    """
    return asyncio.run(_interruptible(_answer(remote, options, whole, output, tally)))


async def _interruptible(work: Coroutine[Any, Any, None]) -> bool:
    """Do the work; whether a signal ended it. SIGTERM is how `ray job stop` ends a job."""
    task = asyncio.create_task(work)
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def _answer(
    remote: RemoteOptions, options: BatchOptions, whole: BatchInput, output: BatchOutput, tally: Tally
) -> None:
    async with AsyncClient(remote.connection()) as client:
        try:
            info = await client.model_info(timeout_s=INFO_TIMEOUT_S)
        except GenerationError as error:
            raise user_error(remote.address, error) from error
        check_input(whole, info)
        output.begin(info.model)
        run_options = RunOptions(
            concurrency=options.concurrency or info.limits.get("max_running", 1),
            request_timeout_s=options.request_timeout_s,
            patience_s=options.patience_s,
        )
        run = BatchRun(client, output, run_options, tally)
        async with showing_progress(tally):
            await run.run([line for line in whole.lines if line.index not in output.done])
        if run.given_up:
            messages.print(
                f"server {remote.address} has been away for {options.patience_s:g} s: the rest was not tried"
            )


def _summarize(tally: Tally, output: Path) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("status")
    table.add_column("lines", justify="right")
    for status, lines in tally.rows():
        table.add_row(status, f"{lines:,}")
    messages.print(table)
    messages.print(escape(f"output: {output.absolute()}"), soft_wrap=True)
    if tally.failed:
        messages.print(escape(f"failures: {output.absolute()}.failed.jsonl"), soft_wrap=True)
    if not tally.complete:
        messages.print("the same command again runs what is missing")
