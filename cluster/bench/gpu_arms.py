"""What `cluster.bench.gpu` compares: engines in processes of their own, one or more of them an arm, that take turns."""

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

from cluster.bench import gpu_arm
from cluster.bench.gpu_arm import ArmFacts, ArmKind, ArmPlan, ArmRun, Workload
from cluster.bench.mps import multi_process_service
from cluster.channel.base import ChannelKind
from cluster.commands.terminal import messages
from cluster.errors import UserError

_START_TIMEOUT_S: Final = 900.0
"""To compile, and to capture graphs. On a fresh machine the imports alone take a minute."""

_RUN_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 30.0

PLAIN: Final = "plain"
COLOCATED: Final = "colocated"
TWO_COLOCATED: Final = "two colocated"

_SEEDS_APART: Final = 500
"""Between the engines of one arm; further than the repeats of a batch size."""


class Engine:
    """The parent's end of one."""

    def __init__(self, plan: ArmPlan, workload: Workload, mps: dict[str, str]) -> None:
        """`mps` are the variables of a client."""
        context = get_context("spawn")
        self.plan = plan
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=gpu_arm.main, args=(plan, workload, theirs), name=plan.name)
        # Before anything there asks for the GPUs.
        with _environment(plan.environment | (mps if plan.with_mps else {})):
            self._process.start()
        theirs.close()

    def facts(self) -> ArmFacts:
        return ArmFacts(**self._answer(_START_TIMEOUT_S))

    def begin(self, *, batch: int, prompt_tokens: int, seed: int) -> None:
        message = {"batch": batch, "prompt_tokens": prompt_tokens, "seed": seed}
        with suppress(BrokenPipeError):  # it has ended, which the answer says
            self._connection.send_bytes(json.dumps(message).encode())

    def result(self) -> ArmRun:
        return ArmRun(**self._answer(_RUN_TIMEOUT_S))

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            self._connection.send_bytes(b"")
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            messages.print(f"{self.plan.name} has not ended after {_STOP_TIMEOUT_S:.0f} s, and is killed")
            self._process.kill()
            self._process.join()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        what, remedy = f"the arm {self.plan.name}", "look at what it wrote last, or run with --debug"
        if not self._connection.poll(timeout_s):
            raise UserError(what, f"it has not answered in {timeout_s:.0f} s", remedy)
        try:
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except EOFError:
            raise UserError(what, "its process has ended", remedy) from None
        if "error" in answer:
            raise UserError(what, answer["error"], remedy)
        return answer


class Arm:
    """One engine, or several beside each other that share a batch."""

    def __init__(self, name: str, engines: Sequence[Engine], num_gpus: int) -> None:
        self.name = name
        self.num_gpus = num_gpus
        self._engines = engines

    def run(self, *, batch: int, prompt_tokens: int, seed: int) -> ArmRun:
        """Raises UserError where an engine fails."""
        parts = split(batch, len(self._engines))
        working = [(engine, part) for engine, part in zip(self._engines, parts, strict=True) if part]
        for number, (engine, part) in enumerate(working):
            engine.begin(batch=part, prompt_tokens=prompt_tokens, seed=seed + number * _SEEDS_APART)
        return together([engine.result() for engine, _ in working])


def split(batch: int, parts: int) -> list[int]:
    """Into parts as equal as can be, the larger ones first."""
    return [batch // parts + (number < batch % parts) for number in range(parts)]


def together(runs: Sequence[ArmRun]) -> ArmRun:
    """Of engines that ran at the same time; those of a separate draft run alone."""
    drafted = [(run.rounds, run.acceptance_length) for run in runs if run.rounds and run.acceptance_length]
    rounds = sum(each for each, _ in drafted)
    return ArmRun(
        tokens_per_second=sum(run.tokens_per_second for run in runs),
        ms_per_round=statistics.fmean(run.ms_per_round for run in runs),
        bytes_per_round=runs[0].bytes_per_round,
        rounds=rounds or None,
        acceptance_length=sum(each * length for each, length in drafted) / rounds if rounds else None,
        parts_us=runs[0].parts_us,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmShape:
    """An arm before it has started, and the GPUs it is counted with. Some engines are in two arms, in turn."""

    name: str
    plans: tuple[ArmPlan, ...]
    num_gpus: int = 1


def on_one_gpu(channels: Sequence[ChannelKind], *, with_mps: bool) -> list[ArmShape]:
    return [
        ArmShape(name=PLAIN, plans=(ArmPlan(name=PLAIN, kind="plain"),)),
        ArmShape(name=COLOCATED, plans=(ArmPlan(name=COLOCATED, kind="colocated"),)),
        *_sharing(channels, (), with_mps),
    ]


def on_two_gpus(
    channels: Sequence[ChannelKind], gpus: tuple[str, str], *, with_shared: bool, with_mps: bool
) -> list[ArmShape]:
    """Each further separate pair has target and draft the other way round, so that all fit: the GPUs are alike.
    `with_shared`: a pair on one of the two as well."""
    first, second = gpus
    colocated = ArmPlan(name=COLOCATED, kind="colocated", gpus=(first,))
    beside = ArmPlan(name=f"{COLOCATED}, on the other GPU", kind="colocated", gpus=(second,))
    shapes = [
        ArmShape(name=PLAIN, plans=(ArmPlan(name=PLAIN, kind="plain", gpus=(first,)),)),
        ArmShape(name=COLOCATED, plans=(colocated,)),
        ArmShape(name=TWO_COLOCATED, plans=(colocated, beside), num_gpus=2),
    ]
    for number, channel in enumerate(channels):
        of_pair = (second, first) if number % 2 else (first, second)
        name = f"separate, {channel}"
        plan = ArmPlan(name=name, kind="separate", gpus=of_pair, channel=channel)
        shapes.append(ArmShape(name=name, plans=(plan,), num_gpus=2))
    if with_shared:
        shapes += _sharing([channel for channel in channels if channel != "nccl"], (second,), with_mps)
    return shapes


def on_ranks(channels: Sequence[ChannelKind], gpus: Sequence[str], size: int) -> list[ArmShape]:
    """Targets of `size` tensor-parallel ranks. A separate draft is on the last rank's GPU, and where there is one more,
    in a further arm on that."""
    of_ranks = tuple(gpus[:size])

    def shape(name: str, kind: ArmKind, *own: str, channel: ChannelKind = "cuda_ipc") -> ArmShape:
        on = (*of_ranks, *own)
        plan = ArmPlan(name=name, kind=kind, gpus=on, channel=channel, tensor_parallel_size=size)
        return ArmShape(name=name, plans=(plan,), num_gpus=len(on))

    shapes = [shape(PLAIN, "plain"), shape(COLOCATED, "colocated")]
    for channel in channels:
        shapes.append(shape(f"separate, {channel}, on the last rank's GPU", "separate", channel=channel))
        shapes += [shape(f"separate, {channel}", "separate", own, channel=channel) for own in gpus[size : size + 1]]
    return shapes


def _sharing(channels: Sequence[ChannelKind], gpus: tuple[str, ...], with_mps: bool) -> list[ArmShape]:
    """Separate pairs on one GPU; with MPS, too."""
    shapes = []
    for channel in channels:
        for under_mps in (False, True) if with_mps else (False,):
            name = f"separate, {channel}, one GPU" + (", MPS" if under_mps else "")
            plan = ArmPlan(name=name, kind="separate", gpus=gpus, channel=channel, with_mps=under_mps)
            shapes.append(ArmShape(name=name, plans=(plan,)))
    return shapes


@contextmanager
def started(shapes: Sequence[ArmShape], workload: Workload) -> Iterator[tuple[list[Arm], dict[str, ArmFacts]]]:
    """All engines start at once: none measures what a GPU has left, as the KV cache's bytes are given. The facts are
    by engine."""
    engines: dict[ArmPlan, Engine] = {}
    facts = {}
    plans = dict.fromkeys(plan for shape in shapes for plan in shape.plans)
    with ExitStack() as stack:
        mps = stack.enter_context(multi_process_service()) if any(plan.with_mps for plan in plans) else {}
        for plan in plans:
            engines[plan] = Engine(plan, workload, mps)
            stack.callback(engines[plan].stop)
        begun = time.monotonic()
        for plan, engine in engines.items():
            with messages.status(f"{plan.name} starts"):
                facts[plan.name] = engine.facts()
            messages.print(f"{plan.name} has started after {time.monotonic() - begun:.0f} s")
        yield [Arm(shape.name, [engines[plan] for plan in shape.plans], shape.num_gpus) for shape in shapes], facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one arm at one length of prompts and one batch size, as in ArmRun: of each repeat, in their order."""

    prompt_tokens: int
    batch: int
    arm: str
    num_gpus: int
    tokens_per_second: list[float]
    ms_per_round: list[float]
    bytes_per_round: float | None
    acceptance_length: float | None
    parts_us: dict[str, float]
    """Of a round on the target's stream, by part: medians of the last repeat; empty where they weren't timed."""

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms_per_round)


def measure(arms: Sequence[Arm], batch: int, prompt_tokens: int, repeats: int) -> list[Figures]:
    """Raises UserError where an arm fails: then there is nothing to compare."""
    runs: dict[str, list[ArmRun]] = {arm.name: [] for arm in arms}
    for repeat in range(repeats + 1):
        turn = repeat % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            what = f"{prompt_tokens:,} tokens in, batch {batch}, repeat {repeat} of {repeats}: {arm.name}"
            with messages.status(what):
                run = arm.run(batch=batch, prompt_tokens=prompt_tokens, seed=1000 * batch + repeat)
            messages.print(f"{what}: {run.tokens_per_second:,.0f} tokens/s, {run.ms_per_round:.2f} ms a round")
            if repeat:  # the first is the warm-up
                runs[arm.name].append(run)
    return [
        Figures(
            prompt_tokens=prompt_tokens,
            batch=batch,
            arm=arm.name,
            num_gpus=arm.num_gpus,
            tokens_per_second=[run.tokens_per_second for run in runs[arm.name]],
            ms_per_round=[run.ms_per_round for run in runs[arm.name]],
            bytes_per_round=runs[arm.name][-1].bytes_per_round,
            acceptance_length=runs[arm.name][-1].acceptance_length,
            parts_us=runs[arm.name][-1].parts_us,
        )
        for arm in arms
    ]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Of processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
