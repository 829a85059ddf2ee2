"""One arm of `cluster.bench.gpu`, in a process of its own: several engines in one process fail on a GPU."""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cluster.bench.dummy_pair import Shape, dummy_settings
from cluster.channel.base import ChannelKind
from cluster.engine.in_process import Completion, GenerationRequest, InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.errors import UserError

if TYPE_CHECKING:
    from cluster.speculation.stream_marks import StreamMarks

ArmKind = Literal["plain", "colocated", "separate"]

_TOKEN_IDS: Final = range(1000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """`gpus` as in CUDA_VISIBLE_DEVICES: the engine's, and behind it its draft's, if that has its own; where there are
    none, all is on the first that this process sees. `channel` is for a separate draft."""

    name: str
    kind: ArmKind
    gpus: tuple[str, ...] = ()
    channel: ChannelKind = "cuda_ipc"
    with_mps: bool = False
    """Both processes are clients of CUDA's Multi-Process Service."""

    @property
    def environment(self) -> dict[str, str]:
        """Of the engine's process, before it starts, but for MPS."""
        return _seeing(self.gpus)

    @property
    def draft_environment(self) -> dict[str, str]:
        """CUDA IPC wants both sides to see both GPUs."""
        return _seeing(self.gpus[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The same for all arms. `kv_cache_bytes` are the target's, with a colocated draft's."""

    shape: Shape
    prompt_tokens: int
    new_tokens: int
    max_batch: int
    acceptance_length: float
    kv_cache_bytes: int
    with_parts: bool
    """Time the parts of a round, by events on the stream, where the draft has a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFacts:
    """Of the target's process. Tokens are what the KV cache has room for."""

    weight_bytes: int
    kv_tokens: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One batch, from its first request's arrival to its last one's end. `rounds` and `acceptance_length` None:
    nothing was drafted."""

    tokens_per_second: float
    rounds: int | None
    acceptance_length: float | None
    parts_us: dict[str, float] = field(default_factory=dict)
    """Medians of the parts of a round on the target's stream, where they were timed."""


# A GPU's memory is shared by several arms, and vLLM refuses to start with less free than this share of it. How much it
# takes is `kv_cache_bytes`' business.
_SHARE: Final = 0.1


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
                _send(connection, asdict(_run(engine, workload, marks, **json.loads(message))))
    except UserError as error:
        _send(connection, {"error": str(error)})


def _engine(plan: ArmPlan, workload: Workload, folder: Path) -> InProcessEngine:
    settings = dummy_settings(
        folder,
        shape=workload.shape,
        with_draft=plan.kind != "plain",
        acceptance_length=workload.acceptance_length,
        max_model_len=workload.prompt_tokens + workload.new_tokens + 64,
        max_num_seqs=workload.max_batch,
        max_num_batched_tokens=8192,
        kv_cache_bytes=workload.kv_cache_bytes,
        gpu_memory_utilization=_SHARE,
    )
    if plan.kind == "separate":
        return SeparateEngine(settings, channel=plan.channel, draft_environment=plan.draft_environment)
    return InProcessEngine(settings)


def _facts(engine: InProcessEngine) -> ArmFacts:
    import torch

    model_runner = engine.vllm_engine.model_executor.driver_worker.worker.model_runner
    models = [model_runner.model] + ([model_runner.speculator.model] if model_runner.speculator is not None else [])
    weights = {id(weight): weight for model in models for weight in model.parameters()}
    return ArmFacts(
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        kv_tokens=engine.vllm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        allocated_bytes=torch.cuda.memory_allocated(),
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


def _run(engine: InProcessEngine, workload: Workload, marks: "StreamMarks | None", *, batch: int, seed: int) -> ArmRun:
    source = random.Random(seed)  # other prompts each time: none is in the prefix cache
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(source.choices(_TOKEN_IDS, k=workload.prompt_tokens)),
            max_tokens=workload.new_tokens,
            ignore_eos=True,
        )
        for _ in range(batch)
    ]
    begun = time.perf_counter()
    completions = engine.generate(requests)
    took_s = time.perf_counter() - begun
    if isinstance(engine, SeparateEngine) and engine.speculator.lost is not None:
        raise UserError("the draft was lost", engine.speculator.lost, "look at what its process wrote last")
    rounds, acceptance_length = _acceptance(completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    return ArmRun(
        tokens_per_second=tokens / took_s,
        rounds=rounds,
        acceptance_length=acceptance_length,
        parts_us=_parts_us(marks),
    )


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
