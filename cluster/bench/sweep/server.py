"""Whom a sweep asks: a cluster of its own, or any server."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from cluster.bench.load.generator import Load, LoadProgress, run_load
from cluster.bench.load.records import LoadResult
from cluster.client import AsyncClient, Connection, ModelInfo

PROGRESS_PERIOD_S: Final = 1.0

Tell = Callable[[LoadProgress], None]


class BenchServer(Protocol):
    """A server that takes load."""

    @property
    def info(self) -> ModelInfo:
        """What it serves."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of its processes: places, memory, KV tokens; as JSON has it."""

    def pages(self) -> Mapping[str, str | None]:
        """Each replica's Prometheus page; empty where they can't be had."""

    def run(self, load: Load, tell: Tell) -> LoadResult:
        """The load, by a generator wherever it is."""


class RemoteServer:
    """Any server, by its address; the generator is in this process."""

    def __init__(self, connection: Connection, info: ModelInfo) -> None:
        self._connection = connection
        self.info = info
        self.facts: Mapping[str, Any] = {"generator": "in the command's process"}

    def pages(self) -> Mapping[str, str | None]:
        return {}

    def run(self, load: Load, tell: Tell) -> LoadResult:
        return asyncio.run(self._run(load, tell))

    async def _run(self, load: Load, tell: Tell) -> LoadResult:
        async with AsyncClient(self._connection) as client:
            return await run_load(client, load, tell, PROGRESS_PERIOD_S)
