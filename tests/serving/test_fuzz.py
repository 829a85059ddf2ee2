"""Whatever is sent, the engine lives, and nobody gets INTERNAL.

As many requests as fit into some seconds; `--fuzz-requests 20000` sends so many.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from dspark.v1 import generation_pb2_grpc as pb_grpc

from cluster.client import Client
from cluster.engine.async_engine import AsyncEngine
from cluster.serving.server import GenerationServer
from tests.serving.fuzz import RequestFuzzer
from tests.serving.loop import LoopThread
from tests.serving.requests import MEDIUM, greedy
from tests.serving.test_cancel import assert_all_blocks_are_freed

SECONDS = 20.0
CALLERS = 24
TIMEOUT_S = 8.0

ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Fuzz:
    def __init__(self, count: int | None) -> None:
        self.statuses: Counter[grpc.StatusCode] = Counter()
        self.refused: list[str] = []
        self._left = count
        self._until = None if count is not None else time.monotonic() + SECONDS

    async def run(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            await asyncio.gather(*(self._caller(stub, seed) for seed in range(CALLERS)))

    def _more(self) -> bool:
        if self._until is not None:
            return time.monotonic() < self._until
        assert self._left is not None
        self._left -= 1
        return self._left >= 0

    async def _caller(self, stub: pb_grpc.GenerationServiceStub, seed: int) -> None:
        fuzzer = RequestFuzzer(seed)
        while self._more():
            await self._call(stub, fuzzer)
            if self.statuses.total() % 1000 == 0:
                print(f"{self.statuses.total():,} requests so far", flush=True)

    async def _call(self, stub: pb_grpc.GenerationServiceStub, fuzzer: RequestFuzzer) -> None:
        request: object = None
        try:
            if fuzzer.chance(0.04):
                request = fuzzer.batch()
                await stub.GenerateBatch(request, timeout=TIMEOUT_S)
            elif fuzzer.chance(0.02):
                request = fuzzer.abort()
                await stub.Abort(request, timeout=TIMEOUT_S)
            else:
                request = fuzzer.request()
                call = stub.Generate(request, timeout=TIMEOUT_S)
                leaving = fuzzer.chance(0.05)
                async for _ in call:
                    if leaving:
                        call.cancel()
                        break
            self.statuses[grpc.StatusCode.OK] += 1
        except grpc.aio.AioRpcError as error:
            self.statuses[error.code()] += 1
            if error.code() not in ALLOWED:
                self.refused.append(f"{error.code().name} {error.details()} for {str(request)[:2000]}")


def test_no_request_kills_the_engine_or_gets_internal(
    serve: Callable[..., GenerationServer], engine: AsyncEngine, loop: LoopThread, pytestconfig: pytest.Config
) -> None:
    server = serve()
    fuzz = Fuzz(pytestconfig.getoption("fuzz_requests"))
    with Client(server.address) as client:
        before = client.generate(greedy(MEDIUM, 8)).choices[0].token_ids
        asyncio.run(fuzz.run(server.address))
        print(f"{fuzz.statuses.total()} requests: {dict(fuzz.statuses)}")
        assert fuzz.refused == []
        assert not engine.dead
        assert client.generate(greedy(MEDIUM, 8)).choices[0].token_ids == before
    # Of both kinds: neither is everything refused, nor everything let through.
    assert fuzz.statuses[grpc.StatusCode.OK] > 20
    assert fuzz.statuses[grpc.StatusCode.INVALID_ARGUMENT] > 20
    assert fuzz.statuses[grpc.StatusCode.UNIMPLEMENTED] > 0
    assert_all_blocks_are_freed(engine, loop)
