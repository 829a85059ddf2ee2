"""A target replica's actor as an engine of the generation service."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.target import ReplicaHealth
from cluster.serving import logs
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.model import ServedModel
from cluster.serving.types import Request

_HEALTH_PERIOD_S: Final = 0.5
"""A replica that has ended is known within this time, also when nobody asks it for anything."""

_SILENT_AFTER_S: Final = 1.4
"""For a health call, which waits behind nothing; with the period, a process that hangs is known within 2 s."""

_METRICS_TIMEOUT_S: Final = 5.0
"""For a step of the engine to end and to be asked; Prometheus waits for 10 s."""


class RemoteEngine:
    """A `GenerationEngine`. What travels through Ray are requests, texts and token ids.

    A replica that is lost may come back: Ray starts its actor again, which loads by itself.
    """

    def __init__(self, replica: Any, model: ServedModel) -> None:
        """`replica` is the handle of a TargetReplica that has started, and answered with `model`."""
        self._replica = replica
        self._model = model
        self._health: ReplicaHealth | None = None
        self._lost = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def dead(self) -> bool:
        return self._lost.is_set()

    @property
    def host(self) -> str:
        """The address of its node; empty before its first answer."""
        return "" if self._health is None else self._health.host

    @property
    def node(self) -> str:
        """Its node's id in Ray; empty before its first answer, and while it is lost."""
        return "" if self._health is None or self.dead else self._health.node

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
        lost = coming = asyncio.create_task(self._lost.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(stream))
                await asyncio.wait((coming, lost), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():  # a process that hangs ends no stream
                    raise EngineDeadError("the replica is lost")
                yield await self._ask(coming.result())
        except StopAsyncIteration:
            ended = True
        except RayActorError as error:
            raise self._gone() from error
        finally:
            lost.cancel()
            coming.cancel()
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
        while True:
            try:
                async with asyncio.timeout(_SILENT_AFTER_S):
                    self._health = await self._replica.health.remote()
            except (TimeoutError, RayActorError):
                self._lost.set()
            else:
                self._follow(self._health)
            await asyncio.sleep(_HEALTH_PERIOD_S)

    def _follow(self, health: ReplicaHealth) -> None:
        if health.dead and not self._lost.is_set():
            # The actor lives on with an engine that doesn't: Ray starts both again.
            logs.event("replica's engine died", host=health.host)
            self._lost.set()
            ray.kill(self._replica, no_restart=False)
        elif health.ready and not health.dead and self._lost.is_set():
            logs.event("replica is back", host=health.host)
            self._lost.clear()

    async def _ask(self, answer: Any) -> Any:
        """The answer, or the error that the replica raised."""
        try:
            return await answer
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise self._gone() from error

    def _gone(self) -> EngineDeadError:
        self._lost.set()
        return EngineDeadError("the replica's process has ended")
