"""Engines on a GPU, each in a process of its own: several in one fail there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.channel.base import ChannelKind
from cluster.contract.policy import Policy
from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import DEFAULT_POLICY, DRAFT_MODULE, SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import HYBRID_BLOCKS, Arm, SplitSettings, greedy, pair_settings, remote

START_TIMEOUT_S = 400.0
LONG, SHORT, MEDIUM = range(100, 290), range(7, 11), range(40, 60)
REQUESTS = [
    [greedy(range(7 + 20 * i, 10 + 20 * i), 9 + 5 * i % 12) for i in range(17)],
    [greedy(LONG, 10), greedy(SHORT, 14)],  # chunks
    [greedy(LONG, 12), greedy(MEDIUM, 60)],  # a cached prefix
    [greedy(range(start, start + 150), 70) for start in (5, 130, 255, 350)],  # a preemption
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separate:
    """How the draft is reached, and what is over its process's environment. Others are as a SeparateEngine has them."""

    channel: ChannelKind
    policy: Policy = DEFAULT_POLICY
    draft_environment: Mapping[str, str] | None = None
    stall_limit_s: float | None = None
    draft_module: str = DRAFT_MODULE

    def start(self, settings: EngineSettings) -> SeparateEngine:
        return SeparateEngine(
            settings,
            channel=self.channel,
            policy=self.policy,
            draft_environment=self.draft_environment,
            stall_limit_s=self.stall_limit_s,
            draft_module=self.draft_module,
            round_deadline_s=120.0,  # attention's kernels may be compiled in a round
        )


class TritonSettings(SplitSettings):
    """With one backend for all sizes of heads, so that an MTP draft can read its target's KV."""

    def to_engine_args(self) -> dict[str, Any]:
        arguments = super().to_engine_args() | {"attention_config": {"backend": "TRITON_ATTN"}}
        arguments["speculative_config"]["attention_backend"] = "TRITON_ATTN"
        return arguments


class EagerTritonSettings(TritonSettings):
    def to_engine_args(self) -> dict[str, Any]:
        return super().to_engine_args() | {"enforce_eager": True}


def settings_of(pair: str, folder: Path, kind: type[EngineSettings] = SplitSettings, **options: Any) -> EngineSettings:
    """As the tests of the split have them, beside other engines on the GPU. `options` are an EngineSettings'."""
    sizes: dict[str, Any] = {"kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.02} | options
    if pair in HYBRID_BLOCKS:
        sizes["num_gpu_blocks"] = HYBRID_BLOCKS[pair][1]
    small = pair_settings(pair, folder, **sizes)
    return kind(**{field.name: getattr(small, field.name) for field in fields(small)})


def apart(function: Callable[..., None], *arguments: Any) -> Any:
    """What `function(*arguments, connection)` sends, in a process of its own, which must end by itself."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_TIMEOUT_S)
        sent = ours.recv()
        process.join(60)
        assert process.exitcode is not None, "it has not ended"
        return sent
    finally:
        process.kill()


def run_arm(settings: EngineSettings, separate: Separate | None, connection: Connection) -> None:
    """Sends the completions and rounds of REQUESTS, and why the draft was lost, if it was."""
    with InProcessEngine(settings) if separate is None else separate.start(settings) as engine:
        arm = Arm(engine)
        runs = [arm.run(requests) for requests in REQUESTS]
        connection.send((runs, None if separate is None else remote(arm).lost))
