"""A target replica's actor as an engine of the generation service."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.target import ReplicaHealth
from cluster.serving import logs
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.model import ServedModel
from cluster.serving.replica_link import ReplicaLink
from cluster.serving.silence import heard
from cluster.serving.types import Request

_HEALTH_PERIOD_S: Final = 0.5
"""A replica that has ended is known within this time, also when nobody asks it for anything."""

_SILENT_AFTER_S: Final = 1.4
"""For a health call, which waits behind nothing; with the period, a process that hangs is known within 2 s."""

_METRICS_TIMEOUT_S: Final = 5.0
"""For a step of the engine to end and to be asked; Prometheus waits for 10 s."""


class RemoteEngine:
    """A `GenerationEngine`. What it generates comes over a stream of the replica's own; the rest is calls of the actor.

    A replica that is lost may come back: Ray starts its actor again, which loads by itself.
    """

    def __init__(self, replica: Any, model: ServedModel) -> None:
        """`replica` is the handle of a TargetReplica that has started, and answered with `model`."""
        self._replica = replica
        self._model = model
        self._health: ReplicaHealth | None = None
        self._loss = asyncio.get_running_loop().create_future()
        self._link: ReplicaLink | None = None
        self._connecting = asyncio.Lock()
        self._watching = asyncio.create_task(self._watch())

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def dead(self) -> bool:
        return self._loss.done()

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
        link = await self._connected()
        try:
            async with aclosing(link.generate(request_id, request, prompt_token_ids, max_tokens)) as deltas:
                async for delta in deltas:
                    yield delta
        except EngineDeadError:
            if link is self._link:  # or it is of an earlier process
                self._lose()
            raise

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
        if self._link is not None:
            self._link.close()

    async def _watch(self) -> None:
        while True:
            try:
                health = await heard(self._replica.health.remote(), _SILENT_AFTER_S, self._messages)
            except (TimeoutError, RayActorError):
                self._lose()
            else:
                self._health = health
                self._follow(health)
            await asyncio.sleep(_HEALTH_PERIOD_S)

    def _messages(self) -> int:
        """That have come over its stream."""
        return 0 if self._link is None else self._link.messages

    def _follow(self, health: ReplicaHealth) -> None:
        if health.dead:
            # The actor lives on with an engine that doesn't: Ray starts both again.
            logs.event("replica's engine died", host=health.host)
            self._lose()
            ray.kill(self._replica, no_restart=False)
        elif not health.ready:
            # Ray has started it again, and a gateway that is new, too, hasn't seen the last one's end.
            if not self.dead:
                logs.event("replica is loading", host=health.host)
            self._lose()
        elif self.dead:
            logs.event("replica is back", host=health.host)
            self._loss = asyncio.get_running_loop().create_future()

    async def _connected(self) -> ReplicaLink:
        """The stream with the replica, a new one where there is none any more."""
        async with self._connecting:
            if self._link is None or self._link.closed:
                asked = self._ask(self._replica.address.remote())
                try:
                    self._link = ReplicaLink(await heard(asked, _SILENT_AFTER_S, self._messages))
                except TimeoutError as error:
                    self._lose()
                    raise EngineDeadError("the replica is silent") from error
            return self._link

    def _lose(self) -> None:
        """What runs there, and what was asked, ends here: a process that hangs ends nothing."""
        if not self.dead:
            self._loss.set_result(None)
        if self._link is not None:
            self._link.close()

    async def _ask(self, call: Any) -> Any:
        """What the replica answers, however late. Raises what it raised, or EngineDeadError once it is lost."""
        answer = asyncio.ensure_future(call)
        answer.add_done_callback(_retrieve)  # nobody may wait for it any more
        try:
            await asyncio.wait([answer, self._loss], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineDeadError("the replica is lost")
            return answer.result()
        except RayTaskError as error:
            if isinstance(error.cause, EngineDeadError):
                self._lose()
            raise error.cause from error
        except RayActorError as error:
            self._lose()
            raise EngineDeadError("the replica's process has ended") from error
        finally:
            answer.cancel()


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """Its error, which asyncio logs otherwise."""
    if not answer.cancelled():
        answer.exception()
