"""`python -m cluster.bench.gpu`: the target alone, with its draft in its process, and with it in another, on one GPU
or, with `--two`, on two; with `--tensor-parallel-size`, the target over several.

The arms run beside each other in one session and take turns, a batch each, so that what else changes hits them all.
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from cluster.bench.dummy_pair import Shape, acceptance_length_of
from cluster.bench.gpu_arm import Workload
from cluster.bench.gpu_arms import COLOCATED, ArmShape, measure, on_one_gpu, on_ranks, on_two_gpus, started
from cluster.bench.gpu_report import GpuReport
from cluster.channel.base import ChannelKind
from cluster.commands.terminal import DebugOption, JsonOption, command, output
from cluster.engine.cpu import profile
from cluster.errors import UserError
from cluster.outputs import write_whole

_BATCHES: Final = (1, 8, 32, 64, 128)
_PROMPT_TOKENS: Final = (128,)
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
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="GPUs over which each target is split; a separate draft has one.")
    ] = 1,
    shape: Annotated[Shape, typer.Option(help="Whose dimensions the pair has.")] = "qwen3-8b",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once, one or more times; default: 1, 8, 32, 64, 128.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm, one or more times, and colocated.")] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Of each arm and batch, after a warm-up.")] = 3,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Of each prompt, one or more times; default: 128.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2)] = 256,
    acceptance_length: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens a round, the target's own included; default: 5.5, with an assistant 3."),
    ] = None,
    kv_gib: Annotated[float, typer.Option(min=1, help="Of each engine's KV cache, in GiB.")] = 12.0,
    channel: Annotated[
        list[str] | None,
        typer.Option(help="What carries the rounds of a separate draft; default: cuda_ipc, on two GPUs nccl, too."),
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="Target's and draft's, by vLLM's name, such as TRITON_ATTN; default: its choice.")
    ] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Time the parts of a separate draft's rounds, too.")] = False,
    result: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the figures there as JSON, after each batch size anew."),
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Compare a draft in a process of its own with one in the target's, and with none, with random weights."""
    if profile.is_cpu_installation():
        raise UserError(
            "this is a CPU installation", "the pairs have 8 to 12 billion weights", "run it on a GPU (PROFILE=gpu)"
        )
    batches, lengths = batch or _BATCHES, prompt_tokens or _PROMPT_TOKENS
    workload = Workload(
        shape=shape,
        prompt_tokens=tuple(lengths),
        new_tokens=new_tokens,
        max_batch=max(batches),
        acceptance_length=acceptance_length_of(shape, acceptance_length),
        kv_cache_bytes=int(kv_gib * _GIB),
        attention_backend=attention_backend,
        with_parts=parts,
    )
    _check_place(result)
    channels = _channels(channel)
    if tensor_parallel_size == 1:
        shapes = _arms(two, shared, mps, channels)
    else:
        shapes = _arms_of_ranks(tensor_parallel_size, two or shared or mps, channels)
    with started(_chosen(shapes, arm), workload) as (arms, facts):
        report = GpuReport(workload, facts)
        for length, one in itertools.product(lengths, batches):
            report.figures += measure(arms, one, length, repeats)
            if result is not None:
                write_whole(result, json.dumps(report.document()))
    if json_output:
        print(json.dumps(report.document()))
        return
    console = output()
    for table in report.tables():
        console.print(table)


def _check_place(result: Path | None) -> None:
    """Before minutes have passed."""
    if result is not None and not result.absolute().parent.is_dir():
        raise UserError(f"--output {result}", "its folder isn't there", "make it first")


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


def _arms_of_ranks(size: int, has_place: bool, channels: Sequence[ChannelKind]) -> list[ArmShape]:
    option, gpus = f"--tensor-parallel-size {size}", _visible_gpus()
    if has_place:
        raise UserError(f"{option} with --two, --shared or --mps", "it has arms of its own", "leave the others out")
    if "nccl" in channels:
        raise UserError(f"{option} with --channel nccl", "NCCL refuses a draft on a rank's GPU", "take cuda_ipc")
    if len(gpus) < size:
        raise UserError(option, f"this process sees {len(gpus)} GPUs", "lower it, or run it where there are as many")
    return on_ranks(channels or ["cuda_ipc"], gpus, size)


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


if __name__ == "__main__":
    typer.run(main)
