"""Several replicas behind one engine's interface."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.serving.engine import EngineDeadError
from cluster.serving.router import Router
from cluster.serving.types import Request, Sampling, TokenPrompt
from tests.serving.scripted_engine import ScriptedEngine

PROMPT = (1, 2, 3)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def request(n: int = 1) -> Request:
    return Request(prompt=TokenPrompt(token_ids=PROMPT), sampling=Sampling(n=n))


def replicas() -> tuple[dict[str, ScriptedEngine], Router]:
    engines = {"target-0": ScriptedEngine(), "target-1": ScriptedEngine()}
    return engines, Router(engines)


async def consume(router: Router, request_id: str, asked: Request, tokens: int = 3) -> int:
    return len([delta async for delta in router.generate(request_id, asked, PROMPT, tokens)])


@in_a_loop
async def test_requests_go_to_the_replica_that_runs_the_fewest_choices() -> None:
    engines, router = replicas()
    for engine in engines.values():
        engine.hold()
    tasks = [asyncio.create_task(consume(router, "wide", request(n=3)))]
    await asyncio.sleep(0)
    for index in range(3):
        tasks.append(asyncio.create_task(consume(router, f"narrow-{index}", request())))
        await asyncio.sleep(0)
    assert router.running == {"target-0": 3, "target-1": 3}
    assert engines["target-0"].running == ["wide"]
    for engine in engines.values():
        engine.go()
    assert await asyncio.gather(*tasks) == [3, 3, 3, 3]
    assert router.running == {"target-0": 0, "target-1": 0}


@in_a_loop
async def test_a_closed_stream_gives_its_place_back() -> None:
    engines, router = replicas()
    engines["target-0"].hold()
    stream = router.generate("a", request(), PROMPT, 3)
    await anext(stream)
    await stream.aclose()
    assert router.running["target-0"] == 0
    assert engines["target-0"].closed == ["a"]


@in_a_loop
async def test_a_dead_replica_gets_nothing() -> None:
    engines, router = replicas()
    engines["target-0"].die()
    assert not router.dead
    assert await consume(router, "a", request()) == 3
    assert engines["target-1"].closed == ["a"]


@in_a_loop
async def test_no_replica_lives() -> None:
    engines, router = replicas()
    for engine in engines.values():
        engine.die()
    assert router.dead
    with pytest.raises(EngineDeadError):
        await consume(router, "a", request())


@in_a_loop
async def test_an_abort_reaches_whichever_runs_it() -> None:
    engines, router = replicas()
    for engine in engines.values():
        engine.hold()
    tasks = [asyncio.create_task(consume(router, name, request())) for name in ("a", "b")]
    await asyncio.sleep(0)
    await router.abort(["a", "b", "unknown"])
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert router.running == {"target-0": 0, "target-1": 0}


class Loading(ScriptedEngine):
    """Says that it isn't ready, though it isn't known to be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def prepare(self, request: Request) -> tuple[int, ...]:
        del request
        self.asked += 1
        await asyncio.sleep(0)
        raise EngineDeadError("loading")


@in_a_loop
async def test_a_prompt_is_tried_once_with_each_replica() -> None:
    engines = {"target-0": Loading(), "target-1": Loading()}
    with pytest.raises(EngineDeadError, match="loading"):
        await asyncio.wait_for(Router(engines).prepare(request()), 5)
    assert [engine.asked for engine in engines.values()] == [1, 1]
    assert await Router({**engines, "target-2": ScriptedEngine()}).prepare(request()) == PROMPT


@in_a_loop
async def test_a_replica_that_was_drained_before_gets_nothing_until_it_is_resumed() -> None:
    engines = {"target-0": ScriptedEngine(), "target-1": ScriptedEngine()}
    router = Router(engines, drained=["target-0"])
    assert router.draining == {"target-0"}
    await consume(router, "a", request())
    assert (engines["target-0"].closed, engines["target-1"].closed) == ([], ["a"])
    router.resume("target-0")
    await consume(router, "b", request())
    assert engines["target-0"].closed == ["b"]
