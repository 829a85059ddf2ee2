"""`python -m cluster.bench.gpu`: the target alone, with its draft in its process, and with it in another, on one GPU.

The three run beside each other in one session and take turns, a batch each, so that what else changes hits all three.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench import gpu_arm
from cluster.bench.gpu_arm import ARMS, ArmFacts, ArmName, ArmRun, Workload
from cluster.channel.base import ChannelKind
from cluster.commands.terminal import DebugOption, JsonOption, command, messages
from cluster.engine.cpu import profile
from cluster.errors import UserError

_START_TIMEOUT_S: Final = 900.0
"""To compile, and to capture graphs. On a fresh machine the imports alone take a minute."""

_RUN_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 30.0
_GIB: Final = 1 << 30


class Arm:
    """The parent's end."""

    def __init__(self, name: ArmName, workload: Workload) -> None:
        context = get_context("spawn")
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=gpu_arm.main, args=(name, asdict(workload), theirs), name=name)
        self._process.start()
        theirs.close()

    def facts(self) -> ArmFacts:
        return ArmFacts(**self._answer(_START_TIMEOUT_S))

    def run(self, batch: int, seed: int) -> ArmRun:
        with suppress(BrokenPipeError):  # it has ended, which the answer says
            self._connection.send_bytes(json.dumps({"batch": batch, "seed": seed}).encode())
        return ArmRun(**self._answer(_RUN_TIMEOUT_S))

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            self._connection.send_bytes(b"")
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        what, remedy = f"the arm {self.name}", "look at what it wrote last, or run with --debug"
        if not self._connection.poll(timeout_s):
            raise UserError(what, f"it has not answered in {timeout_s:.0f} s", remedy)
        try:
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except EOFError:
            raise UserError(what, "its process has ended", remedy) from None
        if "error" in answer:
            raise UserError(what, answer["error"], remedy)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Of one arm at one batch size: tokens/s of each repeat, in their order."""

    batch: int
    arm: ArmName
    tokens_per_second: list[float]
    acceptance_length: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


@contextmanager
def started(workload: Workload) -> Iterator[tuple[list[Arm], dict[ArmName, ArmFacts]]]:
    """All arms at once: the workload says how much memory each one's KV cache takes, so vLLM measures none."""
    arms: list[Arm] = []
    try:
        arms += [Arm(name, workload) for name in ARMS]
        with messages.status(f"starting {', '.join(ARMS)}"):
            facts = {arm.name: arm.facts() for arm in arms}
        yield arms, facts
    finally:
        for arm in arms:
            arm.stop()


def measure(arms: Sequence[Arm], batch: int, repeats: int) -> list[Throughput]:
    """Raises UserError where an arm fails: then there is nothing to compare."""
    runs: dict[ArmName, list[ArmRun]] = {arm.name: [] for arm in arms}
    for repeat in range(repeats + 1):
        turn = repeat % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            with messages.status(f"batch {batch}, repeat {repeat} of {repeats}: {arm.name}"):
                run = arm.run(batch, seed=1000 * batch + repeat)
            if repeat:  # the first is the warm-up
                runs[arm.name].append(run)
    return [
        Throughput(
            batch=batch,
            arm=name,
            tokens_per_second=[run.tokens_per_second for run in of_arm],
            acceptance_length=of_arm[-1].acceptance_length,
        )
        for name, of_arm in runs.items()
    ]


@command
def main(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once, one or more times; default: 1, 8, 32, 64, 128.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Of each arm and batch, after a warm-up.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    acceptance_length: Annotated[float, typer.Option(min=1, help="Tokens a round, the target's own included.")] = 5.5,
    kv_gib: Annotated[float, typer.Option(min=1, help="Of each arm's KV cache, in GiB.")] = 12.0,
    channel: Annotated[ChannelKind, typer.Option(help="What carries the rounds of `separate`.")] = "cuda_ipc",
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Compare a draft in a process of its own with one in the target's, and with none: Qwen3-8B, DSpark, K = 7."""
    if profile.is_cpu_installation():
        raise UserError("this is a CPU installation", "the pair has 8 billion weights", "run it on a GPU (PROFILE=gpu)")
    batches = batch or [1, 8, 32, 64, 128]
    workload = Workload(
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        max_batch=max(batches),
        acceptance_length=acceptance_length,
        kv_cache_bytes=int(kv_gib * _GIB),
        channel=channel,
    )
    with started(workload) as (arms, facts):
        figures = [figure for one in batches for figure in measure(arms, one, repeats)]
    if json_output:
        memory = {name: asdict(each) for name, each in facts.items()}
        print(json.dumps({"workload": asdict(workload), "memory": memory, "runs": list(map(asdict, figures))}))
        return
    console = Console(highlight=False)
    console.print(_speeds(figures))
    console.print(_memory(facts))


def _speeds(figures: Sequence[Throughput]) -> Table:
    table = Table("batch", *ARMS, "separate / colocated", "accepted + 1", caption="tokens/s: median (least–greatest)")
    for batch in dict.fromkeys(figure.batch for figure in figures):
        by_arm = {figure.arm: figure for figure in figures if figure.batch == batch}
        lengths = (by_arm[arm].acceptance_length for arm in ARMS[1:])
        table.add_row(
            str(batch),
            *(_shown(by_arm[arm].tokens_per_second) for arm in ARMS),
            f"{by_arm['separate'].median / by_arm['colocated'].median:.3f}",
            " / ".join("-" if length is None else f"{length:.2f}" for length in reversed(list(lengths))),
        )
    return table


def _memory(facts: dict[ArmName, ArmFacts]) -> Table:
    table = Table("the target's process", "weights, GiB", "KV tokens", "allocated, GiB")
    for name, each in facts.items():
        gib = [f"{num_bytes / _GIB:.2f}" for num_bytes in (each.weight_bytes, each.allocated_bytes)]
        table.add_row(name, gib[0], f"{each.kv_tokens:,}", gib[1])
    return table


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


if __name__ == "__main__":
    typer.run(main)
