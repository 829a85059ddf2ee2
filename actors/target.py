"""The target replica: vLLM's AsyncLLM, whose speculator asks the draft worker."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ray
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from actors.again import call_own, was_restarted
from actors.names import HEALTH
from cluster.config import ClusterConfig
from cluster.engine.cpu import profile
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.model import ServedModel
from cluster.serving.replica_server import ReplicaAddress, ReplicaServer
from cluster.serving.round_metrics import RoundCollector
from cluster.serving.types import Request
from cluster.speculation.figures import AcceptanceFigures
from cluster.speculation.rounds import RoundReport
from cluster.speculation.settings import RemoteDraftSettings

if TYPE_CHECKING:
    from cluster.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHealth:
    """`requests` have ended so far; `acceptance` is of all of them, None without a draft."""

    host: str
    node: str
    """Its id in Ray."""
    ready: bool
    dead: bool
    kv_cache_usage: float
    running: int
    requests: int
    acceptance: AcceptanceFigures | None


class TargetReplica:
    """Its engine's own process ends with the actor's. Ray starts it again when its process has ended, and it loads by
    itself."""

    def __init__(self, config: ClusterConfig, draft: RemoteDraftSettings | None) -> None:
        profile.activate()  # before anything imports torch
        self._config = config
        self._draft = draft
        self._engine: AsyncEngine | None = None
        self._server: ReplicaServer | None = None
        self._address: ReplicaAddress | None = None
        self._starting: asyncio.Task[AsyncEngine] | None = None
        self._running = 0
        self._requests = 0
        self._acceptance: AcceptanceFigures | None = None
        if was_restarted():
            call_own("start")

    async def start(self) -> ServedModel:
        """Load, and pair with the draft worker; the answer says that requests can come. A second call waits for the
        first one's end.

        Raises:
            UserError: the engine or the pair can't start.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        self._engine = await asyncio.shield(self._starting)
        return self._engine.model

    async def prepare(self, request: Request) -> tuple[int, ...]:
        """As `GenerationEngine.prepare`."""
        return await self._started.prepare(request)

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        """As `GenerationEngine.generate`. The gateways' streams call it; through Ray an item costs 1 ms."""
        self._running += 1
        try:
            async with aclosing(self._started.generate(request_id, request, prompt_token_ids, max_tokens)) as deltas:
                async for delta in deltas:
                    self._count(delta)
                    yield delta
        finally:
            self._running -= 1
            self._requests += 1

    @ray.method(concurrency_group=HEALTH)
    async def address(self) -> ReplicaAddress:
        """Where gateways ask for generations. Raises EngineDeadError."""
        if self._address is None:
            raise EngineDeadError("the replica is loading")
        return self._address

    async def round_report(self) -> RoundReport | None:
        """Of the rounds with the draft worker; None without one. Raises EngineDeadError."""
        return await self._started.round_report()

    async def metrics(self) -> str:
        """This process's page of Prometheus figures: vLLM's, and those of the rounds. Raises EngineDeadError."""
        page = generate_latest(REGISTRY)
        if (report := await self.round_report()) is not None:
            rounds = CollectorRegistry()
            rounds.register(RoundCollector(report))
            page += generate_latest(rounds)
        return page.decode()

    async def abort(self, request_ids: list[str]) -> None:
        """As `GenerationEngine.abort`."""
        await self._started.abort(request_ids)

    @ray.method(concurrency_group=HEALTH)
    async def health(self) -> ReplicaHealth:
        engine = self._engine
        return ReplicaHealth(
            host=ray.util.get_node_ip_address(),
            node=ray.get_runtime_context().get_node_id(),
            ready=engine is not None,
            dead=engine is not None and engine.dead,
            kv_cache_usage=0.0 if engine is None else engine.kv_cache_usage,
            running=self._running,
            requests=self._requests,
            acceptance=self._acceptance,
        )

    async def stop(self) -> None:
        """End the engine's process, and with it the pair."""
        if self._server is not None:
            await self._server.stop()
        if self._engine is not None:
            await self._engine.close()

    @property
    def _started(self) -> "AsyncEngine":
        if self._engine is None:  # Ray has started the process again, and who asks doesn't know it yet
            raise EngineDeadError("the replica is loading")
        return self._engine

    async def _start(self) -> "AsyncEngine":
        engine = await asyncio.to_thread(self._build)
        self._server = ReplicaServer(self.generate)
        self._address = await self._server.start(ray.util.get_node_ip_address())
        return engine

    def _build(self) -> "AsyncEngine":
        # Here, not above: they import vLLM.
        from cluster.engine.async_engine import AsyncEngine
        from cluster.engine.build import engine_settings
        from cluster.engine.pair import target_engine_args

        settings = engine_settings(self._config)
        more = {} if self._draft is None else target_engine_args(settings, self._draft)
        return AsyncEngine(settings, more_engine_args=more)

    def _count(self, delta: EngineDelta) -> None:
        for choice in delta.choices:
            if choice.speculation is not None:
                gained = choice.speculation.acceptance
                self._acceptance = gained if self._acceptance is None else self._acceptance + gained


TARGET_ACTOR: Final[Any] = ray.remote(max_restarts=-1, concurrency_groups={HEALTH: 1})(TargetReplica)
