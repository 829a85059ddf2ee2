"""`python -m cluster.bench.gpu`: the target alone, with its draft in its process, and with it in another, on one GPU
or, with `--two`, on two.

The arms run beside each other in one session and take turns, a batch each, so that what else changes hits them all.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Final, get_args

import typer
from rich.table import Table

from cluster.bench.dummy_pair import Shape, logits_bytes
from cluster.bench.environment import environment
from cluster.bench.gpu_arm import ArmFacts, Workload
from cluster.bench.gpu_arms import COLOCATED, ArmShape, Throughput, as_plain, measure, on_one_gpu, on_two_gpus, started
from cluster.channel.base import ChannelKind
from cluster.commands.terminal import DebugOption, JsonOption, command, output
from cluster.engine.cpu import profile
from cluster.errors import UserError

_BATCHES: Final = (1, 8, 32, 64, 128)
_GIB: Final = 1 << 30


@command
def main(
    two: Annotated[bool, typer.Option("--two", help="On two GPUs: the draft has one of its own.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="With --two: a separate draft on its target's GPU, too.")
    ] = False,
    mps: Annotated[
        bool, typer.Option("--mps", help="A draft on its target's GPU under CUDA's Multi-Process Service, too.")
    ] = False,
    shape: Annotated[Shape, typer.Option(help="Whose dimensions the pair has.")] = "qwen3-8b",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once, one or more times; default: 1, 8, 32, 64, 128.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm, one or more times, and colocated.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Of each arm and batch, after a warm-up.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    acceptance_length: Annotated[float, typer.Option(min=1, help="Tokens a round, the target's own included.")] = 5.5,
    kv_gib: Annotated[float, typer.Option(min=1, help="Of each engine's KV cache, in GiB.")] = 12.0,
    channel: Annotated[
        list[str] | None,
        typer.Option(help="What carries the rounds of a separate draft; default: cuda_ipc, on two GPUs nccl, too."),
    ] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Time the parts of a separate draft's rounds, too.")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Compare a draft in a process of its own with one in the target's, and with none: random weights, K = 7."""
    if profile.is_cpu_installation():
        raise UserError("this is a CPU installation", "the pair has 8 billion weights", "run it on a GPU (PROFILE=gpu)")
    batches = batch or _BATCHES
    workload = Workload(
        shape=shape,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        max_batch=max(batches),
        acceptance_length=acceptance_length,
        kv_cache_bytes=int(kv_gib * _GIB),
        with_parts=parts,
    )
    with started(_chosen(_arms(two, shared, mps, _channels(channel)), arm), workload) as (arms, facts):
        figures = [figure for one in batches for figure in measure(arms, one, repeats)]
    logits = logits_bytes(shape, max(batches))
    if json_output:
        document = {
            "environment": environment(),
            "workload": asdict(workload),
            "memory": {name: asdict(each) for name, each in facts.items()},
            "logits_bytes": logits,
            "runs": [as_plain(figure) for figure in figures],
        }
        print(json.dumps(document))
        return
    console = output()
    console.print(_speeds(figures))
    if parts:
        console.print(_parts(figures))
    console.print(_memory(facts, workload, logits))


def _channels(names: Sequence[str] | None) -> list[ChannelKind]:
    known = get_args(ChannelKind)
    for name in names or ():
        if name not in known:
            raise UserError(f"--channel {name}", "there is no such channel", f"take one of: {', '.join(known)}")
    return [kind for kind in known if kind in (names or ())]


def _arms(two: bool, shared: bool, mps: bool, channels: Sequence[ChannelKind]) -> list[ArmShape]:
    if not two:
        if "nccl" in channels:
            raise UserError("--channel nccl", "NCCL refuses two ranks on one GPU", "run it on two GPUs (--two)")
        return on_one_gpu(channels or ["cuda_ipc"], with_mps=mps)
    gpus = _visible_gpus()
    if len(gpus) < 2:
        raise UserError("--two", f"this process sees {len(gpus)} GPUs", "leave it out, or run it where there are two")
    return on_two_gpus(channels or ["cuda_ipc", "nccl"], (gpus[0], gpus[1]), with_shared=shared or mps, with_mps=mps)


def _chosen(arms: Sequence[ArmShape], names: Sequence[str] | None) -> list[ArmShape]:
    known = [each.name for each in arms]
    for name in names or ():
        if name not in known:
            raise UserError(f"--arm {name}", "there is no such arm", f"take one of: {'; '.join(known)}")
    return [each for each in arms if not names or each.name in (COLOCATED, *names)]


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _speeds(figures: Sequence[Throughput]) -> Table:
    table = Table(
        "batch", "arm", "GPUs", "tokens/s", "a GPU", "of colocated", "accepted + 1", caption="median (least–greatest)"
    )
    colocated = {figure.batch: figure.median for figure in figures if figure.arm == COLOCATED}
    for figure in figures:
        length = figure.acceptance_length
        table.add_row(
            str(figure.batch),
            figure.arm,
            str(figure.num_gpus),
            _shown(figure.tokens_per_second),
            f"{figure.median / figure.num_gpus:,.0f}",
            f"{figure.median / colocated[figure.batch]:.3f}",
            "-" if length is None else f"{length:.2f}",
        )
    return table


def _parts(figures: Sequence[Throughput]) -> Table:
    timed = [figure for figure in figures if figure.parts_us]
    names = list(dict.fromkeys(name for figure in timed for name in figure.parts_us))
    table = Table("batch", "arm", *names, caption="µs of a round on the target's stream: medians of the last repeat")
    for figure in timed:
        table.add_row(str(figure.batch), figure.arm, *(f"{figure.parts_us.get(name, 0.0):,.1f}" for name in names))
    return table


def _memory(facts: Mapping[str, ArmFacts], workload: Workload, logits: tuple[int, int]) -> Table:
    of_target, of_draft = (f"{num_bytes / _GIB:.2f}" for num_bytes in logits)
    table = Table(
        "the target's process",
        "weights, GiB",
        "KV tokens",
        "in colocated's memory",
        "allocated, GiB",
        caption=f"logits of the largest round, GiB: {of_target} at the target, {of_draft} at the draft",
    )
    for name, each in facts.items():
        gib = [f"{num_bytes / _GIB:.2f}" for num_bytes in (each.weight_bytes, each.allocated_bytes)]
        tokens = kv_tokens_in(facts[COLOCATED], each, workload.kv_cache_bytes)
        table.add_row(name, gib[0], f"{each.kv_tokens:,}", f"{tokens:,}", gib[1])
    return table


def kv_tokens_in(whole: ArmFacts, each: ArmFacts, kv_cache_bytes: int) -> int:
    """KV tokens that `each` has room for if it takes as much memory for weights and KV as `whole` does."""
    return int(each.kv_tokens * (1 + (whole.weight_bytes - each.weight_bytes) / kv_cache_bytes))


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


if __name__ == "__main__":
    typer.run(main)
