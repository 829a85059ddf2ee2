"""Several replicas of one model as one engine."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from cluster.serving import logs
from cluster.serving.engine import EngineDeadError, EngineDelta, GenerationEngine
from cluster.serving.errors import unavailable
from cluster.serving.model import ServedModel
from cluster.serving.moving import Progress
from cluster.serving.settings import DEFAULT_MAX_MOVES, DEFAULT_RETURN_S
from cluster.serving.types import FinishReason, Request

_POLL_S: Final = 0.02


@dataclass(eq=False, slots=True, kw_only=True)
class _Stream:
    """A request while one replica runs it."""

    request_id: str
    choices: int
    is_unwanted: bool = False
    """It is to go on elsewhere, unless it comes to its end first."""
    is_evicted: bool = False
    """It has ended there, and goes on elsewhere."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Replica:
    name: str
    engine: GenerationEngine
    streams: set[_Stream] = field(default_factory=set)
    draining: bool = False

    @property
    def running(self) -> int:
        return sum(stream.choices for stream in self.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How the requests of a drained replica ended: there, or elsewhere."""

    finished: int
    moved: int


class Router:
    """A `GenerationEngine`: each request goes to the living replica that runs the fewest choices, and from one that is
    lost or drained to the next."""

    def __init__(
        self,
        replicas: Mapping[str, GenerationEngine],
        *,
        max_moves: int = DEFAULT_MAX_MOVES,
        return_s: float = DEFAULT_RETURN_S,
        drained: Collection[str] = (),
    ) -> None:
        """`replicas` by name, one at least; all serve the same model. Those that are `drained` get no requests before
        they are resumed. The rest is as in ListenSettings."""
        self._replicas = {
            name: _Replica(name=name, engine=engine, draining=name in drained) for name, engine in replicas.items()
        }
        self._max_moves = max_moves
        self._return_s = return_s
        self._aborted: set[str] = set()
        self._requests: set[str] = set()
        self._moves = 0

    @property
    def replicas(self) -> Mapping[str, GenerationEngine]:
        return {name: replica.engine for name, replica in self._replicas.items()}

    @property
    def running(self) -> Mapping[str, int]:
        """Choices that run, by replica."""
        return {name: replica.running for name, replica in self._replicas.items()}

    @property
    def draining(self) -> set[str]:
        """The replicas that get no more requests."""
        return {name for name, replica in self._replicas.items() if replica.draining}

    @property
    def moves(self) -> int:
        """Requests that went from one replica to another, so far."""
        return self._moves

    @property
    def model(self) -> ServedModel:
        return next(iter(self._replicas.values())).engine.model

    @property
    def dead(self) -> bool:
        return not self._living()

    @property
    def kv_cache_usage(self) -> float:
        """Of the fullest replica."""
        return max(replica.engine.kv_cache_usage for replica in self._replicas.values())

    async def prepare(self, request: Request) -> tuple[int, ...]:
        tried: set[str] = set()
        while True:
            replica = self._choose(tried)
            try:
                return await replica.engine.prepare(request)
            except EngineDeadError:
                tried.add(replica.name)
                if all(each.name in tried for each in self._living()):
                    raise

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        """As of a GenerationEngine. Raises RequestError (UNAVAILABLE), too, where a replica is lost and the request
        can't go on elsewhere exactly as it would have; what was sent stands."""
        progress = Progress(request, prompt_token_ids, max_tokens)
        left: list[str] = []
        self._requests.add(request_id)
        try:
            while True:
                if left:
                    await self._await_replica(request_id)
                    if request_id in self._aborted:
                        return
                    self._moves += 1
                replica = self._choose(left)
                stream = _Stream(request_id=request_id, choices=request.sampling.n or 1)
                async with aclosing(self._run(replica, stream, progress)) as deltas:
                    async for delta in deltas:
                        yield delta
                if not stream.is_evicted:
                    return
                left.append(replica.name)
                self._check_move(request_id, progress, replica, moves=len(left))
        finally:
            self._requests.discard(request_id)
            self._aborted.discard(request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._aborted |= self._requests.intersection(ids)
        await asyncio.gather(*(self._abort(replica, ids) for replica in self._replicas.values()))

    async def drain(self, name: str, grace_s: float) -> Drained:
        """Give the replica no more requests, from now on; those that run there have `grace_s` to end, then are moved.
        Returns when it runs none of them."""
        replica = self._replicas[name]
        replica.draining = True
        streams = frozenset(replica.streams)
        logs.event("replica draining", target=name, running=len(streams))
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while streams & replica.streams and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)
        while rest := streams & replica.streams:
            for stream in rest:
                stream.is_unwanted = True
            # Again and again: the replica may not know yet of one that was given to it just before.
            await self._abort(replica, [stream.request_id for stream in rest])
            await asyncio.sleep(_POLL_S)
        moved = sum(stream.is_evicted for stream in streams)
        logs.event("replica drained", target=name, moved=moved)
        return Drained(finished=len(streams) - moved, moved=moved)

    def resume(self, name: str) -> None:
        """Give a drained replica requests again."""
        self._replicas[name].draining = False
        logs.event("replica back in service", target=name)

    async def close(self) -> None:
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas.values()))

    async def _run(self, replica: _Replica, stream: _Stream, progress: Progress) -> AsyncGenerator[EngineDelta, None]:
        """What one replica adds. The stream is evicted afterwards, if the request goes on elsewhere."""
        request, prompt, most = progress.rest()
        replica.streams.add(stream)
        try:
            async with aclosing(replica.engine.generate(stream.request_id, request, prompt, most)) as deltas:
                async for delta in deltas:
                    if stream.is_unwanted and _was_aborted(delta) and stream.request_id not in self._aborted:
                        stream.is_evicted = True
                        return
                    yield progress.add(delta)
        except EngineDeadError:
            stream.is_evicted = True
        finally:
            replica.streams.discard(stream)

    def _check_move(self, request_id: str, progress: Progress, replica: _Replica, *, moves: int) -> None:
        sent = f"{replica.name}, which ran the request, has ended after {progress.num_tokens} tokens"
        if (why := progress.why_not()) is not None:
            raise unavailable(f"{sent}, and it can't go on elsewhere: {why}")
        if moves > self._max_moves:
            raise unavailable(f"{sent}, and it has been moved {self._max_moves} times")
        logs.event("request to be moved", request_id=request_id, away_from=replica.name, tokens=progress.num_tokens)

    async def _abort(self, replica: _Replica, request_ids: list[str]) -> None:
        if not replica.engine.dead:
            try:
                await replica.engine.abort(request_ids)
            except EngineDeadError:
                return  # and so they have ended

    async def _await_replica(self, request_id: str) -> None:
        """For a request that has run: until there is one, or it is aborted, or it has waited long enough."""
        deadline_s = asyncio.get_running_loop().time() + self._return_s
        while self.dead and request_id not in self._aborted and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_POLL_S)

    def _choose(self, avoided: Iterable[str]) -> _Replica:
        living = self._living()
        if not living:
            raise EngineDeadError("no replica is in service")
        # One that was lost and is there again is better than none.
        fresh = [replica for replica in living if replica.name not in set(avoided)]
        return min(fresh or living, key=lambda replica: replica.running)

    def _living(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if not replica.engine.dead and not replica.draining]


def _was_aborted(delta: EngineDelta) -> bool:
    return any(choice.finish_reason is FinishReason.ABORTED for choice in delta.choices)
