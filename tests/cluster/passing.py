"""How many messages a gateway passes on, and how late: `python -m tests.cluster.passing`.

A scripted replica, the gateway and a gRPC client, each a process of its own on this machine. Every request of the
replica makes a token each step, or as fast as it can where a step takes no time; a token says when it was made.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, Final

import ray

from actors.gateway import GATEWAY_ACTOR
from actors.names import HEALTH
from actors.target import TargetReplica
from cluster.bench.percentiles import percentile
from cluster.client import AsyncClient
from cluster.serving.engine import EngineDelta
from cluster.serving.settings import ServerSettings
from cluster.serving.types import ChoiceDelta, FinishReason, Request, RoundFigures
from cluster.speculation.figures import AcceptanceFigures
from tests.cluster.scripted import CONFIG, request
from tests.serving.scripted_engine import MODEL, ScriptedEngine

_CLOCK_US: Final = 1 << 30
"""Of the clock that tokens tell, which begins again and again: a token is a small number."""

_ROUND: Final = RoundFigures(
    acceptance=AcceptanceFigures(rounds=1, drafted=7, accepted_by_position=(1, 1, 1, 0, 0, 0, 0)),
    rounds_without_draft=0,
)


class PacedEngine(ScriptedEngine):
    """All requests step together. One that is late makes up for it."""

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s)
        self.model = replace(MODEL, max_model_len=1 << 20)

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        del request_id, request, prompt_token_ids
        due_s = time.monotonic()
        due_s += self._step_s - due_s % self._step_s if self._step_s else 0.0
        for position in range(max_tokens):
            await asyncio.sleep(due_s - time.monotonic())
            due_s += self._step_s
            last = FinishReason.LENGTH if position == max_tokens - 1 else None
            choice = ChoiceDelta(index=0, text="a", token_ids=(_now_us(),), finish_reason=last, speculation=_ROUND)
            yield EngineDelta(choices=(choice,), cached_tokens=0)


class PacedReplica(TargetReplica):
    def __init__(self, step_s: float) -> None:
        super().__init__(CONFIG, None)
        self._step_s = step_s

    def _build(self) -> Any:
        return PacedEngine(self._step_s)


@dataclass(slots=True)
class Passed:
    """`late_ms` of each token, from its step to the client."""

    messages: int
    late_ms: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--step-ms", type=float, default=0.0, help="0: as fast as it can")
    parser.add_argument("--tokens", type=int, default=4096, help="of all requests together")
    arguments = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"  # as in conftest
    ray.init("local", namespace="passing", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=0, concurrency_groups={HEALTH: 1})(PacedReplica)
    replica = actor.remote(arguments.step_ms / 1e3)
    gateway = GATEWAY_ACTOR.remote(ServerSettings(port=0), {"target-0": (replica, ray.get(replica.start.remote()))})
    address = ray.get(gateway.start.remote())
    print("concurrency  tokens/s  messages/s  late ms: median     p99")
    for concurrency in arguments.concurrency:
        asyncio.run(_load(address, concurrency, 16))
        begun_s = time.perf_counter()
        passed = asyncio.run(_load(address, concurrency, max(16, arguments.tokens // concurrency)))
        seconds = time.perf_counter() - begun_s
        tokens, messages = len(passed.late_ms) / seconds, passed.messages / seconds
        late = [percentile(passed.late_ms, share) for share in (50, 99)]
        print(f"{concurrency:11}  {tokens:8,.0f}  {messages:10,.0f}  {late[0]:15,.2f}  {late[1]:6,.2f}", flush=True)
    ray.shutdown()


async def _load(address: str, concurrency: int, tokens: int) -> Passed:
    passed = Passed(0, [])

    async def one(client: AsyncClient) -> None:
        async for response in client.stream(request(tokens)):
            now_us = _now_us()
            passed.messages += 1
            passed.late_ms += [(now_us - made_us) % _CLOCK_US / 1e3 for made_us in response.choices[0].token_ids]

    async with AsyncClient(address) as client:
        await asyncio.gather(*(one(client) for _ in range(concurrency)))
    return passed


def _now_us() -> int:
    return int(time.monotonic() * 1e6) % _CLOCK_US


if __name__ == "__main__":
    main()
