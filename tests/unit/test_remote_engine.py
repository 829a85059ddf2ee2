"""A replica as its gateway knows it: living, lost, loading. In the place of Ray's actor is one that a test plays."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors import remote_engine
from actors.remote_engine import RemoteEngine
from actors.target import ReplicaHealth
from cluster.serving.engine import EngineDeadError
from cluster.serving.errors import RequestError, invalid
from cluster.serving.router import Router
from cluster.serving.types import Request, TokenPrompt
from tests.serving.scripted_engine import MODEL, ScriptedEngine
from tests.unit.test_router import in_a_loop

DEADLINE_S = 20
REQUEST = Request(prompt=TokenPrompt(token_ids=(1, 2)))


class Replica:
    """Answers `remote` calls as an actor does, a hanging one none; `pending` are the answers that may still come."""

    def __init__(self) -> None:
        self.hangs = False
        self.ready = True
        self.pending: list[asyncio.Future[Any]] = []
        self.health = SimpleNamespace(remote=lambda: self._answer(self._health))
        self.prepare = SimpleNamespace(remote=lambda request: self._answer(lambda: self._prepared(request)))
        self.abort = SimpleNamespace(remote=lambda _: self._answer(lambda: None))
        self.metrics = SimpleNamespace(remote=lambda: self._answer(lambda: "page"))

    def _answer(self, made: Callable[[], Any]) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        if self.hangs:
            self.pending.append(answer)
            return answer
        try:
            answer.set_result(made())
        except EngineDeadError as error:
            answer.set_exception(RayTaskError("prepare", "", error, proctitle="", pid=1, ip="127.0.0.1"))
        return answer

    def _health(self) -> ReplicaHealth:
        return ReplicaHealth(
            host="127.0.0.1",
            node="a",
            ready=self.ready,
            dead=False,
            kv_cache_usage=0.0,
            running=0,
            requests=0,
            acceptance=None,
        )

    def _prepared(self, request: Request) -> tuple[int, ...]:
        if not self.ready:
            raise EngineDeadError("the replica is loading")
        assert isinstance(request.prompt, TokenPrompt)
        return request.prompt.token_ids


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(remote_engine, "_SILENT_AFTER_S", 0.2)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def within(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, DEADLINE_S)


@pytest.mark.parametrize(
    "ask",
    [lambda engine: engine.prepare(REQUEST), lambda engine: engine.abort(["a"])],
    ids=["prepare", "abort"],
)
@in_a_loop
async def test_what_was_asked_of_a_replica_that_hangs_ends_when_it_is_lost(ask: Callable[..., Any]) -> None:
    """And nobody is told of an answer that comes afterwards, an error or none."""
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    replica = Replica()
    engine = RemoteEngine(replica, MODEL)
    replica.hangs = True
    asked = [asyncio.create_task(ask(engine)) for _ in range(2)]
    for each in asked:
        with pytest.raises(EngineDeadError):
            await within(each)
    assert engine.dead
    for answer in replica.pending:
        if not answer.done():
            answer.set_exception(RayActorError())
    await engine.close()
    del asked, each, replica, engine, answer
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


@in_a_loop
async def test_a_slow_answer_of_a_replica_that_lives_is_waited_for() -> None:
    replica = Replica()
    engine = RemoteEngine(replica, MODEL)
    await until(lambda: engine.node == "a")
    replica.hangs = True
    asked = asyncio.create_task(engine.prepare(REQUEST))
    await asyncio.sleep(0)
    (answer,) = replica.pending
    replica.hangs = False
    await asyncio.sleep(2 * remote_engine._SILENT_AFTER_S)
    answer.set_result((7,))
    assert await within(asked) == (7,)
    await engine.close()


@in_a_loop
async def test_a_request_and_an_abort_go_on_without_a_replica_that_hangs() -> None:
    hanging, other = Replica(), ScriptedEngine()
    engine = RemoteEngine(hanging, MODEL)
    router = Router({"target-0": engine, "target-1": other})
    hanging.hangs = True
    asked = asyncio.create_task(router.prepare(REQUEST))
    await within(router.abort(["b"]))
    assert await within(asked) == (1, 2)
    await within(router.abort(["c"]))
    await engine.close()


@in_a_loop
async def test_a_replica_that_loads_is_lost_until_it_is_ready() -> None:
    replica = Replica()
    replica.ready = False
    engine = RemoteEngine(replica, MODEL)
    await until(lambda: engine.dead)
    assert await engine.metrics() is None
    replica.ready = True
    await until(lambda: not engine.dead)
    assert await within(engine.prepare(REQUEST)) == (1, 2)
    await engine.close()


@in_a_loop
async def test_a_replica_that_says_that_it_loads_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its health is asked again: it would take each request first, as it runs the fewest."""
    monkeypatch.setattr(remote_engine, "_HEALTH_PERIOD_S", DEADLINE_S)
    replica = Replica()
    engine = RemoteEngine(replica, MODEL)
    await until(lambda: engine.node == "a")
    replica.ready = False
    with pytest.raises(EngineDeadError, match="loading"):
        await engine.prepare(REQUEST)
    assert engine.dead
    await engine.close()


@in_a_loop
async def test_what_a_replica_refuses_is_no_loss() -> None:
    replica = Replica()
    engine = RemoteEngine(replica, MODEL)
    replica.hangs = True
    asked = asyncio.create_task(engine.prepare(REQUEST))
    await asyncio.sleep(0)
    answer = replica.pending[-1]
    replica.hangs = False
    refusal = invalid("prompt", "it is odd")
    answer.set_exception(RayTaskError("prepare", "", refusal, proctitle="", pid=1, ip="127.0.0.1"))
    with pytest.raises(RequestError, match="odd"):
        await within(asked)
    assert not engine.dead
    await engine.close()
