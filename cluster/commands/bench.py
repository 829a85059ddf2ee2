"""`dspark-cluster bench`: arms under the same load, in a folder that a second start goes on with."""

import math
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from cluster.bench.dummy_pair import parse_shape, write_pair
from cluster.bench.environment import environment
from cluster.bench.load.generator import LoadProgress
from cluster.bench.report.document import document, is_clean
from cluster.bench.report.page import page
from cluster.bench.report.table import csv_table
from cluster.bench.sweep.arms import Variant
from cluster.bench.sweep.plan import BenchPlan, Cell
from cluster.bench.sweep.run import absent_run, run_cell
from cluster.bench.sweep.runs import OtherSweepError, RunFolder, is_good
from cluster.bench.sweep.server import BenchServer, RemoteServer
from cluster.bench.sweep.summary import THROUGHPUT
from cluster.cache import cache_dir
from cluster.commands.generate_remote import RemoteOptions, ask_model
from cluster.commands.terminal import messages
from cluster.config import Override
from cluster.contract.codec import to_text
from cluster.engine.settings import EngineOptions
from cluster.errors import UserError
from cluster.models.demo_draft import demo_draft_dir
from cluster.models.demo_target import demo_target
from cluster.serving.limits import Limits

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

_LINE_PERIOD_S: Final = 10.0
"""Between two lines of a run's progress where there is no terminal."""

OpenServer = Callable[[Variant], AbstractContextManager[BenchServer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutput:
    """Where results go."""

    folder: Path
    json_output: bool


def bench(plan: BenchPlan, output: BenchOutput, server: OpenServer) -> None:
    """Run what has no result yet, a variant's server opened once for all of its cells, then write the report.

    Exit code 0: every run's figures can be used; 1: a request, a run or a server failed, or the generator was the
    bottleneck; 130: interrupted, and the command can be repeated, as after 1. Raises UserError for what can't be.
    """
    with RunFolder(output.folder, plan) as folder, _stoppable():
        try:
            _Sweep(folder).run(server)
        except (
            KeyboardInterrupt,
            SystemExit,
        ):  # which Ray raises for SIGTERM: it puts its handler in the place of ours
            _report(folder)  # of what there is
            messages.print("interrupted; the same command again runs what is missing")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        whole = _report(folder)
    if output.json_output:
        print(to_text(whole), end="")
    else:
        _show(whole)
    messages.print(escape(f"report: {(output.folder / 'report.html').absolute()}"), soft_wrap=True)
    if not is_clean(whole):
        raise typer.Exit(EXIT_FAILED)


def demo_pair(concurrencies: Sequence[int | None]) -> list[Override]:
    """The demo's target, made where it is absent, and its draft, with room for so many requests at once."""
    with messages.status("looking for the demo's target") as status:
        target = demo_target(progress=status.update)
    return _pair("the demo's pair", target, demo_draft_dir(), concurrencies)


def dummy_pair(shape: str, concurrencies: Sequence[int | None]) -> list[Override]:
    """A pair of random weights in the dimensions of one that is too large to keep, with room for so many requests at
    once. Raises UserError for another word."""
    flag = f"--dummy {shape}"
    target, draft = write_pair(cache_dir() / "dummies", parse_shape(shape, flag))
    return [*_pair(flag, target, draft, concurrencies), Override(path="model.load_format", value="dummy", flag=flag)]


def _pair(flag: str, target: Path, draft: Path, concurrencies: Sequence[int | None]) -> list[Override]:
    together = max((concurrency or 1 for concurrency in concurrencies), default=1)
    values = {
        "model.target": str(target),
        "model.draft": str(draft),
        "engine.max_model_len": 1024,
        "engine.max_num_seqs": max(together, EngineOptions().max_num_seqs),
        "gateway.limits.max_running": max(together, Limits().max_running),
    }
    return [Override(path=path, value=value, flag=flag) for path, value in values.items()]


@contextmanager
def existing_server(access: RemoteOptions) -> Iterator[BenchServer]:
    """One that is there, as it is. Raises UserError where it doesn't answer."""
    connection = access.connection()
    yield RemoteServer(connection, ask_model(connection))


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM, by which `ray job stop` ends a job, is as Ctrl-C within the block: an event loop ends by that itself."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,  # which a shell's `&` may have turned off
        signal.SIGTERM: lambda *_: signal.raise_signal(signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Sweep:
    def __init__(self, folder: RunFolder) -> None:
        self._plan = folder.plan
        self._folder = folder
        self._nonce = secrets.token_hex(8)  # a server's prefix cache may have what an earlier command asked
        self._ended = 0

    def run(self, server: OpenServer) -> None:
        for variant in self._plan.variants:
            missing = [
                (cell, repeat)
                for cell in self._plan.cells(variant)
                for repeat in range(self._plan.repeats)
                if not is_good(self._folder.read(cell, repeat))
            ]
            before = len(list(self._plan.cells(variant))) * self._plan.repeats - len(missing)
            self._ended += before
            if before:
                messages.print(escape(f"{variant.name}: {before} runs are there from before"), soft_wrap=True)
            if missing or variant.config is None:  # of a server that was there, whether it is the same still
                self._run_variant(variant, missing, server)

    def _run_variant(self, variant: Variant, missing: list[tuple[Cell, int]], server: OpenServer) -> None:
        doing = "starting" if variant.config is not None else "asking it"
        messages.print(escape(f"{variant.name}: {doing}"), soft_wrap=True)
        try:
            with server(variant) as opened:
                if variant.config is None:
                    self._folder.begin(opened.info.model)
                self._warn_of_limits(variant, opened)
                for cell, repeat in missing:
                    self._run_cell(opened, cell, repeat)
        except OtherSweepError:  # of which no run may be written over
            raise
        except UserError as error:
            # The others may do; this one's cells say why it didn't.
            messages.print(f"{variant.name}: {error}", style="red", markup=False, soft_wrap=True)
            for cell, repeat in missing:
                if not is_good(self._folder.read(cell, repeat)):
                    self._folder.write(cell, repeat, absent_run(cell, repeat, str(error)))

    def _warn_of_limits(self, variant: Variant, server: BenchServer) -> None:
        """Say where a load waits in the server, whose time it then has in TTFT."""
        rated = math.inf not in self._plan.request_rates  # how many are at once then, nobody knows before
        unbounded = 0 if rated else self._plan.shape.num_prompts
        most = max(unbounded if each is None else each for each in self._plan.concurrencies)
        limits = {"gateway.limits.max_running": server.info.limits.get("max_running", most)}
        if variant.config is not None:
            engines = variant.config.engine.max_num_seqs * variant.config.pools.replicas
            limits["engine.max_num_seqs, of all replicas,"] = engines
        for name, limit in limits.items():
            if limit < most:
                messages.print(f"{name} is {limit}: of {most} requests at once the others wait in the server")

    def _run_cell(self, server: BenchServer, cell: Cell, repeat: int) -> None:
        self._ended += 1
        where = f"run {self._ended} of {self._plan.num_runs}: {cell.name}, repeat {repeat + 1} of {self._plan.repeats}"
        with messages.status(escape(where)) as status:
            shown_s = time.monotonic()

            def tell(progress: LoadProgress) -> None:
                nonlocal shown_s
                how_far = f"{where}; {progress.ended} of {progress.total} requests, {progress.output_tokens:,} tokens"
                how_far += f", {progress.failed} failed" if progress.failed else ""
                status.update(escape(how_far))
                if not messages.is_terminal and time.monotonic() - shown_s > _LINE_PERIOD_S:
                    shown_s = time.monotonic()
                    messages.print(escape(how_far), soft_wrap=True)

            run = run_cell(server, self._plan, cell, repeat, self._nonce, tell)
        self._folder.write(cell, repeat, run)
        messages.print(escape(f"{where}: {run['why_not'] or _in_short(run)}"), soft_wrap=True)


def _report(folder: RunFolder) -> dict[str, Any]:
    """Write the results in three forms; returns the first."""
    plan = folder.plan
    cells = [cell for variant in plan.variants for cell in plan.cells(variant)]
    runs = {cell.key: [folder.read(cell, repeat) for repeat in range(plan.repeats)] for cell in cells}
    whole = document(plan, [(cell, runs[cell.key]) for cell in cells], environment())
    folder.write_file(Path("results.json"), to_text(whole))
    folder.write_file(Path("results.csv"), csv_table(whole))
    folder.write_file(Path("report.html"), page(whole))
    return whole


def _in_short(run: dict[str, Any]) -> str:
    figures = run["figures"]
    text = f"{figures['output_throughput']:,.1f} tokens/s, median TTFT {figures['median_ttft_ms']:,.0f} ms"
    if run["acceptance"] is not None:
        text += f", acceptance length {run['acceptance']['acceptance_length']:.2f}"
    return text


def _acceptance_length(cell: dict[str, Any]) -> str:
    if (synthetic := cell["synthetic_acceptance_length"]) is not None:
        return f"synthetic {synthetic:g}"
    return f"{cell['acceptance']['acceptance_length']:.2f}" if cell["acceptance"] else ""


def _show(whole: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in (
        "cell",
        "status",
        f"tokens/s per {whole['unit']}",
        "tokens/s per user",
        "TTFT ms",
        "TPOT ms",
        "length",
    ):
        table.add_column(column, justify="left" if column in ("cell", "status") else "right")
    names = (THROUGHPUT, "output_speed_per_user", "median_ttft_ms", "median_tpot_ms")
    for cell in whole["cells"]:
        medians = [f"{cell['figures'][name]['median']:,.1f}" if name in cell["figures"] else "" for name in names]
        table.add_row(escape(cell["name"]), cell["status"], *medians, _acceptance_length(cell))
    messages.print(table)
    for each in whole["comparisons"]:
        messages.print(escape(each["sentence"]), soft_wrap=True)
    for cell in whole["cells"]:
        if cell["why"]:
            messages.print(escape(f"{cell['name']}: {cell['status']}: {cell['why']}"), soft_wrap=True)
