"""A server of a scripted engine, over real gRPC."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import GenerationError
from cluster.serving.server import GenerationServer
from cluster.serving.settings import ServerSettings
from tests.serving.loop import LoopThread
from tests.serving.scripted_engine import ScriptedEngine

DEADLINE_S = 20
NOT_SERVING_BAR_S = 0.1
"""From when a server is to take no more requests until its health says so."""

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


class Served:
    """A server of a scripted engine; calls into the engine are made in its loop."""

    def __init__(self, loop: LoopThread, settings: ServerSettings, step_s: float) -> None:
        self.loop = loop
        self.engine, self.server = loop.run(self._start(settings, step_s))

    async def _start(self, settings: ServerSettings, step_s: float) -> tuple[ScriptedEngine, GenerationServer]:
        engine = ScriptedEngine(step_s)
        server = GenerationServer(engine, settings, replica="replica-7")
        await server.start()
        return engine, server

    def tell(self, what: Callable[[], Any]) -> Any:
        async def told() -> Any:
            return what()

        return self.loop.run(told())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.tell(condition):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def health(self, service: str) -> int:
        with grpc.insecure_channel(self.server.address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S).status)


@pytest.fixture
def start(loop: LoopThread) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def one(step_s: float = 0.0, **settings: Any) -> Served:
        started.append(Served(loop, ServerSettings(**{"port": 0, "drain_grace_s": 5.0} | settings), step_s))
        return started[-1]

    yield one
    for served in started:
        served.tell(served.engine.go)
        loop.run(served.server.stop())


def background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start the work in a thread; call what is returned for its result."""
    future: Future[Any] = Future()
    threading.Thread(target=lambda: future.set_result(work()), daemon=True).start()
    return lambda: future.result(DEADLINE_S)


def failing(call: Callable[[], Any]) -> GenerationError:
    with pytest.raises(GenerationError) as failure:
        call()
    return failure.value
