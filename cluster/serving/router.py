"""Several replicas of one model as one engine."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing

from cluster.serving.engine import EngineDeadError, EngineDelta, GenerationEngine
from cluster.serving.model import ServedModel
from cluster.serving.types import Request


class Router:
    """A `GenerationEngine`: each request goes to the living replica that runs the fewest choices."""

    def __init__(self, replicas: Mapping[str, GenerationEngine]) -> None:
        """`replicas` by name, one at least; all serve the same model."""
        self._replicas = dict(replicas)
        self._running = dict.fromkeys(replicas, 0)

    @property
    def replicas(self) -> Mapping[str, GenerationEngine]:
        return self._replicas

    @property
    def running(self) -> Mapping[str, int]:
        """Choices that run, by replica."""
        return self._running

    @property
    def model(self) -> ServedModel:
        return next(iter(self._replicas.values())).model

    @property
    def dead(self) -> bool:
        return not self._living()

    @property
    def kv_cache_usage(self) -> float:
        """Of the fullest replica."""
        return max(replica.kv_cache_usage for replica in self._replicas.values())

    async def prepare(self, request: Request) -> tuple[int, ...]:
        return await self._replicas[self._choose()].prepare(request)

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        name, choices = self._choose(), request.sampling.n or 1
        self._running[name] += choices
        try:
            deltas = self._replicas[name].generate(request_id, request, prompt_token_ids, max_tokens)
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            self._running[name] -= choices

    async def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        await asyncio.gather(*(self._replicas[name].abort(ids) for name in self._living()))

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def _choose(self) -> str:
        living = self._living()
        if not living:
            raise EngineDeadError("every replica has died")
        return min(living, key=self._running.__getitem__)

    def _living(self) -> list[str]:
        return [name for name, replica in self._replicas.items() if not replica.dead]
