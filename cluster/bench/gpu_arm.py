"""One arm of `cluster.bench.gpu`, in a process of its own: several engines in one process fail on a GPU."""

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cluster.bench.dummy_pair import Shape, dummy_settings
from cluster.channel.base import ChannelKind
from cluster.contract.facts import KVSharing
from cluster.contract.memory import parameter_bytes
from cluster.engine.in_process import Completion, GenerationDelta, GenerationRequest, InProcessEngine, join_deltas
from cluster.engine.separate import SeparateEngine
from cluster.errors import UserError
from cluster.speculation.rounds import RoundTimes

if TYPE_CHECKING:
    from cluster.speculation.stream_marks import StreamMarks

ArmKind = Literal["plain", "colocated", "separate"]

_TOKEN_IDS: Final = range(1000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """`gpus` as in CUDA_VISIBLE_DEVICES: the engine's, one a tensor-parallel rank, and behind them its draft's, if that
    has its own, else it is on the last; where there are none, all is on the first that this process sees. `channel` is
    for a separate draft."""

    name: str
    kind: ArmKind
    gpus: tuple[str, ...] = ()
    channel: ChannelKind = "cuda_ipc"
    tensor_parallel_size: int = 1
    with_mps: bool = False
    """Both processes are clients of CUDA's Multi-Process Service."""

    @property
    def environment(self) -> dict[str, str]:
        """Of the engine's process, before it starts, but for MPS."""
        return _seeing(self.gpus)

    @property
    def draft_environment(self) -> dict[str, str]:
        """CUDA IPC wants both sides to see all GPUs; the draft is on the first that it sees."""
        return _seeing(self.gpus[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The same for all arms. `kv_cache_bytes` are the target's, with a colocated draft's; `attention_backend` None is
    vLLM's choice."""

    shape: Shape
    prompt_tokens: tuple[int, ...]
    """Lengths of prompts that there will be batches of."""
    new_tokens: int
    max_batch: int
    acceptance_length: float
    kv_cache_bytes: int
    attention_backend: str | None
    with_parts: bool
    """Time the parts of a round, by events on the stream, where the draft has a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFacts:
    """Of the target's process. Tokens are what the KV cache has room for. `attention_backends`: of all layers that are
    there, a separate draft's included. `kv_sharing`: how a separate draft reads its target's KV, if it does."""

    weight_bytes: int
    kv_tokens: int
    allocated_bytes: int
    attention_backends: list[str]
    kv_sharing: KVSharing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One batch. `tokens_per_second`: from its first request's arrival to its last one's end, prompts and all.
    `rounds` and `acceptance_length` None: nothing was drafted.

    `ms_per_round` and `bytes_per_round`: of the rounds, without drafts the steps, in which every request advanced by
    what it had decoded. Bytes are those between a target and a separate draft, both ways."""

    tokens_per_second: float
    ms_per_round: float
    bytes_per_round: float | None
    rounds: int | None
    acceptance_length: float | None
    parts_us: dict[str, float] = field(default_factory=dict)
    """Medians of the parts of a round on the target's stream, where they were timed."""


# A GPU's memory is shared by several arms, and vLLM refuses to start with less free than this share of it. How much it
# takes is `kv_cache_bytes`' business.
_SHARE: Final = 0.02

_ROUND_DEADLINE_S: Final = 120.0
"""Kernels of attention are compiled in the rounds of the warm-up."""


def main(plan: ArmPlan, workload: Workload, connection: Connection) -> None:
    """Answer with the facts, then each batch size with its run, as JSON, until an empty message comes."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dspark-bench-") as folder,
            _engine(plan, workload, Path(folder)) as engine,
        ):
            marks = _marks(engine) if workload.with_parts else None
            _send(connection, asdict(_facts(engine)))
            while message := connection.recv_bytes():
                _send(connection, asdict(run_batch(engine, workload, marks, **json.loads(message))))
    except UserError as error:
        _send(connection, {"error": str(error)})


def _engine(plan: ArmPlan, workload: Workload, folder: Path) -> InProcessEngine:
    settings = dummy_settings(
        folder,
        shape=workload.shape,
        with_draft=plan.kind != "plain",
        acceptance_length=workload.acceptance_length,
        attention_backend=workload.attention_backend,
        max_model_len=max(workload.prompt_tokens) + workload.new_tokens + 64,
        max_num_seqs=workload.max_batch,
        max_num_batched_tokens=8192,
        kv_cache_bytes=workload.kv_cache_bytes,
        gpu_memory_utilization=_SHARE,
        tensor_parallel_size=plan.tensor_parallel_size,
    )
    if plan.kind == "separate":
        return SeparateEngine(
            settings,
            channel=plan.channel,
            draft_environment=plan.draft_environment,
            round_deadline_s=_ROUND_DEADLINE_S,
        )
    return InProcessEngine(settings)


def _facts(engine: InProcessEngine) -> ArmFacts:
    import torch

    worker = engine.vllm_engine.model_executor.driver_worker.worker
    model_runner = worker.model_runner
    models = [model_runner.model] + ([model_runner.speculator.model] if model_runner.speculator is not None else [])
    contract = engine.contract if isinstance(engine, SeparateEngine) else None
    if contract is not None:
        backends = {group.attention_backend for group in contract.groups}
    else:
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return ArmFacts(
        weight_bytes=parameter_bytes(weight for model in models for weight in model.parameters()),
        kv_tokens=engine.vllm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        allocated_bytes=torch.cuda.memory_allocated(),
        attention_backends=sorted(backends),
        kv_sharing=None if contract is None else contract.kv_sharing,
    )


def _marks(engine: InProcessEngine) -> "StreamMarks | None":
    import torch

    from cluster.speculation.stream_marks import StreamMarks
    from cluster.speculation.target_rounds import DeviceRounds

    rounds = engine.speculator.rounds if isinstance(engine, SeparateEngine) else None
    if not isinstance(rounds, DeviceRounds):
        return None
    marks = StreamMarks(partial(torch.cuda.Event, enable_timing=True))
    rounds.mark = marks.mark
    return marks


def _parts_us(marks: "StreamMarks | None") -> dict[str, float]:
    if marks is None:
        return {}
    import torch

    torch.cuda.synchronize()  # or the last events have no time
    return marks.take_microseconds()


def run_batch(
    engine: InProcessEngine,
    workload: Workload,
    marks: "StreamMarks | None",
    *,
    batch: int,
    prompt_tokens: int,
    seed: int,
) -> ArmRun:
    # Other prompts each time, of which none is another's beginning: nothing is in the prefix cache.
    source = random.Random(f"{seed} {prompt_tokens}")
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(source.choices(_TOKEN_IDS, k=prompt_tokens)),
            max_tokens=workload.new_tokens,
            ignore_eos=True,
        )
        for _ in range(batch)
    ]
    decoding = DecodingRounds(batch, engine.speculator.times if isinstance(engine, SeparateEngine) else None)
    deltas: list[list[GenerationDelta]] = [[] for _ in requests]
    begun = time.perf_counter()
    for step in engine.steps(requests):
        decoding.add(len(step))
        for delta in step:
            deltas[delta.index].append(delta)
    took_s = time.perf_counter() - begun
    completions = [join_deltas(of_request) for of_request in deltas]
    if isinstance(engine, SeparateEngine) and engine.speculator.lost is not None:
        raise UserError("the draft was lost", engine.speculator.lost, "look at what its process wrote last")
    rounds, acceptance_length = _acceptance(completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    return ArmRun(
        tokens_per_second=tokens / took_s,
        ms_per_round=decoding.ms_per_round,
        bytes_per_round=decoding.bytes_per_round,
        rounds=rounds,
        acceptance_length=acceptance_length,
        parts_us=_parts_us(marks),
    )


class DecodingRounds:
    """The rounds of a batch between the step that gives its last request the first token and the first request's end:
    each advances all, and none has a prompt in it."""

    def __init__(self, batch: int, times: RoundTimes | None, clock: Callable[[], float] = time.perf_counter) -> None:
        """`times` are a separate draft's, which it goes on adding to."""
        self._batch = batch
        self._times = times
        self._clock = clock
        self._rounds = -1  # the first one's end is where the time begins
        self._begun_s = self._ended_s = 0.0
        self._before = self._after = (0, 0)

    def add(self, num_advanced: int) -> None:
        """A step has ended that advanced so many requests."""
        if num_advanced < self._batch:  # a prompt's; or, with async scheduling, a step that only sent work
            return
        self._ended_s, self._after = self._clock(), self._sent()
        if self._rounds < 0:
            self._begun_s, self._before = self._ended_s, self._after
        self._rounds += 1

    @property
    def ms_per_round(self) -> float:
        """Raises UserError where there was none."""
        if self._rounds < 1:
            raise UserError(
                f"a batch of {self._batch}", "there was no round of all of its requests", "raise --new-tokens"
            )
        return 1e3 * (self._ended_s - self._begun_s) / self._rounds

    @property
    def bytes_per_round(self) -> float | None:
        """None without a separate draft."""
        rounds, num_bytes = (after - before for before, after in zip(self._before, self._after, strict=True))
        return num_bytes / rounds if rounds else None

    def _sent(self) -> tuple[int, int]:
        """Rounds and bytes so far, which with async scheduling are a step ahead: that one is of all requests, too."""
        times = self._times
        return (0, 0) if times is None else (times.rounds, times.request_bytes + times.reply_bytes)


def _acceptance(completions: Sequence[Completion]) -> tuple[int, float] | tuple[None, None]:
    figures = [completion.acceptance for completion in completions if completion.acceptance is not None]
    if not figures:
        return None, None
    total = sum(figures[1:], start=figures[0])
    return total.rounds, total.acceptance_length


def _seeing(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _send(connection: Connection, plain: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(plain).encode())
