"""One real AsyncLLM with a draft, served over loopback, and the same target alone to compare with."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from cluster.client import Client
from cluster.engine.async_engine import AsyncEngine
from cluster.engine.in_process import InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.serving.server import GenerationServer
from cluster.serving.settings import ServerSettings
from tests.checkpoints import TinyPair, make_pair
from tests.serving.loop import LoopThread

MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 16
NUM_GPU_BLOCKS = 64


@pytest.fixture(scope="package")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair("qwen3-dspark-agreeing", tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="package")
def engine_settings(pair: TinyPair) -> EngineSettings:
    target, draft = open_model(str(pair.target), role="target"), open_model(str(pair.draft), role="draft")
    return EngineSettings(
        target=target,
        speculation=plan_speculation(target, draft, pair.num_speculative_tokens),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=256,
        num_gpu_blocks=NUM_GPU_BLOCKS,
    )


@pytest.fixture(scope="package")
def engine(engine_settings: EngineSettings, loop: LoopThread) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(engine_settings)
    yield engine
    loop.run(engine.close())


@pytest.fixture(scope="package")
def alone(engine_settings: EngineSettings) -> Iterator[InProcessEngine]:
    """The target without a draft and without a server."""
    settings = {field.name: getattr(engine_settings, field.name) for field in fields(EngineSettings)}
    with InProcessEngine(_WithoutStats(**settings | {"speculation": None})) as engine:
        yield engine


class _WithoutStats(EngineSettings):
    """A vLLM engine that keeps figures takes those of the process's other engines out of Prometheus' registry."""

    def to_engine_args(self) -> dict[str, Any]:
        return super().to_engine_args() | {"disable_log_stats": True}


@pytest.fixture(scope="module")
def serve(engine: AsyncEngine, loop: LoopThread) -> Iterator[Callable[..., GenerationServer]]:
    """Start a server of the one engine with settings of its own; they all stop when the module ends."""
    servers: list[GenerationServer] = []

    def start(**settings: object) -> GenerationServer:
        async def started() -> GenerationServer:
            server = GenerationServer(engine, ServerSettings(**{"port": 0, "drain_grace_s": 0.0} | settings))
            await server.start()
            return server

        servers.append(loop.run(started()))
        return servers[-1]

    yield start
    for server in servers:
        loop.run(server.stop())


@pytest.fixture(scope="module")
def server(serve: Callable[..., GenerationServer]) -> GenerationServer:
    return serve(metrics_port=0)


@pytest.fixture
def client(server: GenerationServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
