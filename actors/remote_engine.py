"""A target replica's actor as an engine of the generation service."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.target import ReplicaHealth
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.model import ServedModel
from cluster.serving.types import Request

_HEALTH_PERIOD_S: Final = 0.5
"""A replica that has ended is known within this time, also when nobody asks it for anything."""

_METRICS_TIMEOUT_S: Final = 5.0
"""For a step of the engine to end and to be asked; Prometheus waits for 10 s."""


class RemoteEngine:
    """A `GenerationEngine`. What travels through Ray are requests, texts and token ids."""

    def __init__(self, replica: Any, model: ServedModel) -> None:
        """`replica` is the handle of a TargetReplica that has started, and answered with `model`."""
        self._replica = replica
        self._model = model
        self._health: ReplicaHealth | None = None
        self._lost = False
        self._watching = asyncio.create_task(self._watch())

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def dead(self) -> bool:
        return self._lost or (self._health is not None and self._health.dead)

    @property
    def kv_cache_usage(self) -> float:
        return 0.0 if self._health is None else self._health.kv_cache_usage

    async def prepare(self, request: Request) -> tuple[int, ...]:
        tokens: tuple[int, ...] = await self._ask(self._replica.prepare.remote(request))
        return tokens

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        stream = self._replica.generate.options(num_returns="streaming").remote(
            request_id, request, prompt_token_ids, max_tokens
        )
        ended = False
        try:
            async for delta in stream:
                yield await self._ask(delta)
            ended = True
        except RayActorError as error:
            raise self._gone() from error
        finally:
            if not ended:
                ray.cancel(stream)

    async def metrics(self) -> str | None:
        """Its page of Prometheus figures, or None where it doesn't come in time."""
        if self.dead:
            return None
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT_S):
                page: str = await self._ask(self._replica.metrics.remote())
                return page
        except (TimeoutError, EngineDeadError):
            return None

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self._ask(self._replica.abort.remote(list(request_ids)))

    async def close(self) -> None:
        """Look after it no longer. The replica goes on: it is its cluster's to stop."""
        self._watching.cancel()

    async def _watch(self) -> None:
        while not self.dead:
            try:
                self._health = await self._replica.health.remote()
            except RayActorError:
                self._lost = True
            await asyncio.sleep(_HEALTH_PERIOD_S)

    async def _ask(self, answer: Any) -> Any:
        """The answer, or the error that the replica raised."""
        try:
            return await answer
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise self._gone() from error

    def _gone(self) -> EngineDeadError:
        self._lost = True
        return EngineDeadError("the replica's process has ended")
