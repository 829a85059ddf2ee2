"""A target replica's actor whose engine is scripted, and what is asked of it."""

import os
from typing import Any, Final

import ray

from actors.names import HEALTH
from actors.target import TargetReplica
from cluster.client import Request, Stopping, TokenPrompt
from cluster.config import ClusterConfig, ModelConfig
from cluster.speculation.rounds import RoundReport, RoundTimes
from tests.serving.scripted_engine import ScriptedEngine

CONFIG: Final = ClusterConfig(model=ModelConfig(target="scripted"))


class ScriptedReplica(TargetReplica):
    def _build(self) -> Any:
        return ScriptedEngine()

    async def hold(self) -> None:
        self._engine.hold()  # type: ignore[union-attr]

    async def go(self) -> None:
        self._engine.go()  # type: ignore[union-attr]

    async def die(self) -> None:
        self._engine.die()  # type: ignore[union-attr]

    async def process(self) -> int:
        return os.getpid()

    async def round_report(self) -> RoundReport:
        return RoundReport(times=RoundTimes(rounds=3, encode=0.5, request_bytes=77), epoch=2, lost=False)


SCRIPTED_ACTOR: Final[Any] = ray.remote(num_cpus=0, concurrency_groups={HEALTH: 1})(ScriptedReplica)


def request(tokens: int = 5, **more: Any) -> Request:
    return Request(prompt=TokenPrompt(token_ids=(1, 2)), stopping=Stopping(max_tokens=tokens), **more)
