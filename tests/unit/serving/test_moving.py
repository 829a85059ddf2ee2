"""A request whose replica is lost, or drained, goes on with another one, without a lost or repeated token."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import grpc
import pytest

from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.errors import RequestError
from cluster.serving.router import Drained, Router
from cluster.serving.types import (
    ChoiceDelta,
    FinishReason,
    OutputOptions,
    Request,
    Sampling,
    Stopping,
    StructuredOutput,
    TokenPrompt,
)
from tests.serving.scripted_engine import ScriptedEngine
from tests.unit.test_router import in_a_loop

PROMPT = (100, 101, 102)
GREEDY = Request(prompt=TokenPrompt(token_ids=PROMPT), sampling=Sampling(temperature=0.0))
NUM_TOKENS = 6


class Successor(ScriptedEngine):
    """Its next token is one more than the last, whoever made that; it dies or stands still after some."""

    def __init__(self, *, dies_after: int | None = None, holds_after: int | None = None) -> None:
        super().__init__()
        self._dies_after = dies_after
        self._holds_after = holds_after
        self.asked: list[tuple[Request, tuple[int, ...], int]] = []

    def go_on(self) -> None:
        self._holds_after = None

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        self.asked.append((request, prompt_token_ids, max_tokens))
        for position in range(max_tokens):
            if position == self._dies_after:
                self.die()
                raise EngineDeadError("scripted")
            while position == self._holds_after and request_id not in self._aborted:
                await asyncio.sleep(0.001)
            ended = request_id in self._aborted
            token = prompt_token_ids[-1] + 1 + position
            last = FinishReason.LENGTH if position == max_tokens - 1 else None
            choice = ChoiceDelta(
                index=0,
                text="" if ended else f"{token} ",
                token_ids=() if ended else (token,),
                finish_reason=FinishReason.ABORTED if ended else last,
            )
            yield EngineDelta(choices=(choice,), cached_tokens=position and 1)
            if ended:
                return


async def run(
    router: Router, request: Request = GREEDY, name: str = "a", into: list[EngineDelta] | None = None
) -> list[EngineDelta]:
    deltas = [] if into is None else into
    async for delta in router.generate(name, request, PROMPT, NUM_TOKENS):
        deltas.append(delta)
    return deltas


def tokens_of(deltas: list[EngineDelta]) -> list[int]:
    return [token for delta in deltas for choice in delta.choices for token in choice.token_ids]


@in_a_loop
async def test_a_lost_replicas_stream_goes_on_elsewhere() -> None:
    lost, other = Successor(dies_after=2), Successor()
    router = Router({"target-0": lost, "target-1": other})
    deltas = await run(router)
    assert tokens_of(deltas) == list(range(103, 103 + NUM_TOKENS))
    assert [each.choices[0].finish_reason for each in deltas][-2:] == [None, FinishReason.LENGTH]
    assert [asked[1:] for asked in other.asked] == [((*PROMPT, 103, 104), NUM_TOKENS - 2)]
    assert router.moves == 1
    assert router.running == {"target-0": 0, "target-1": 0}


@in_a_loop
async def test_what_is_said_once_isnt_said_again() -> None:
    request = Request(
        prompt=TokenPrompt(token_ids=PROMPT),
        stopping=Stopping(min_tokens=5),
        output=OutputOptions(prompt_logprobs=1),
    )
    other = Successor()
    await run(Router({"target-0": Successor(dies_after=2), "target-1": other}), request)
    asked = other.asked[0][0]
    assert asked.output.prompt_logprobs is None
    assert asked.stopping.min_tokens == 3


@pytest.mark.parametrize(
    "more",
    [
        {"structured_output": StructuredOutput(kind="json_object")},
        {"sampling": Sampling(presence_penalty=0.5)},
        {"sampling": Sampling(frequency_penalty=0.5)},
        {"sampling": Sampling(bad_words=("no",))},
        {"stopping": Stopping(stop_strings=("end",))},
    ],
)
@in_a_loop
async def test_what_cant_be_exact_ends(more: dict[str, Any]) -> None:
    """But where nothing was sent yet, it just begins elsewhere."""
    request = Request(prompt=TokenPrompt(token_ids=PROMPT), **more)
    router = Router({"target-0": Successor(dies_after=2), "target-1": Successor()})
    sent: list[EngineDelta] = []
    with pytest.raises(RequestError, match="can't go on elsewhere") as refusal:
        await run(router, request, into=sent)
    assert refusal.value.status is grpc.StatusCode.UNAVAILABLE
    assert tokens_of(sent) == [103, 104]
    fresh = Router({"target-0": Successor(dies_after=0), "target-1": Successor()})
    assert tokens_of(await run(fresh, request)) == list(range(103, 103 + NUM_TOKENS))


@in_a_loop
async def test_the_only_replica_may_come_back() -> None:
    replica = Successor(dies_after=4)
    router = Router({"target-0": replica})
    running = asyncio.create_task(run(router))
    while not router.dead:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert len(replica.asked) == 1
    replica.dead = False
    assert tokens_of(await running) == list(range(103, 103 + NUM_TOKENS))
    assert router.moves == 1


@in_a_loop
async def test_the_only_replica_is_not_waited_for_without_end() -> None:
    router = Router({"target-0": Successor(dies_after=2)}, return_s=0.05)
    with pytest.raises(EngineDeadError):
        await run(router)


@in_a_loop
async def test_a_request_that_waits_for_its_replica_can_be_aborted() -> None:
    replica = Successor(dies_after=4)
    router = Router({"target-0": replica})
    running = asyncio.create_task(run(router, name="mine"))
    while not router.dead:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    await router.abort(["mine"])
    assert tokens_of(await running) == [103, 104, 105, 106]
    assert router.moves == 0


@in_a_loop
async def test_a_request_is_moved_so_often_and_no_more() -> None:
    router = Router({f"target-{i}": Successor(dies_after=1) for i in range(5)}, max_moves=2)
    with pytest.raises(RequestError, match="moved 2 times"):
        await run(router)


@in_a_loop
async def test_a_drained_replica_has_its_grace_then_its_streams_move() -> None:
    slow, other = Successor(holds_after=2), Successor()
    router = Router({"target-0": slow, "target-1": other})
    running = asyncio.create_task(run(router))
    while not slow.asked:
        await asyncio.sleep(0)
    drained = await router.drain("target-0", grace_s=0.05)
    assert (drained.finished, drained.moved) == (0, 1)
    assert tokens_of(await running) == list(range(103, 103 + NUM_TOKENS))
    assert router.draining == {"target-0"}
    await run(router, name="b")
    assert len(slow.asked) == 1


@in_a_loop
async def test_a_request_that_ends_in_time_isnt_moved() -> None:
    slow = Successor(holds_after=2)
    router = Router({"target-0": slow, "target-1": Successor()})
    running = asyncio.create_task(run(router))
    while not slow.asked:
        await asyncio.sleep(0)
    draining = asyncio.create_task(router.drain("target-0", grace_s=5))
    await asyncio.sleep(0)
    slow.go_on()
    drained = await draining
    assert (drained.finished, drained.moved) == (1, 0)
    assert len(tokens_of(await running)) == NUM_TOKENS
    assert router.moves == 0


class Latecomer(Successor):
    """Knows of a request only when it is `heard` of; an abort before that is lost."""

    def __init__(self) -> None:
        super().__init__(holds_after=2)
        self.heard = asyncio.Event()
        self.aborts = 0

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        await self.heard.wait()
        async for delta in super().generate(request_id, request, prompt_token_ids, max_tokens):
            yield delta

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.aborts += 1
        if self.heard.is_set():
            await super().abort(request_ids)


async def aborted_unheard(
    late: Latecomer, router: Router
) -> tuple[asyncio.Task[list[EngineDelta]], asyncio.Task[Drained]]:
    """The request and the drain of its replica, which doesn't know of it when it is to be aborted."""
    running = asyncio.create_task(run(router))
    await asyncio.sleep(0)
    draining = asyncio.create_task(router.drain("target-0", grace_s=0))
    while not late.aborts:
        await asyncio.sleep(0)
    return running, draining


@in_a_loop
async def test_a_request_that_its_replica_hears_of_after_the_abort_is_moved_nevertheless() -> None:
    late = Latecomer()
    router = Router({"target-0": late, "target-1": Successor()})
    running, draining = await aborted_unheard(late, router)
    late.heard.set()
    drained = await asyncio.wait_for(draining, 5)
    assert (drained.finished, drained.moved) == (0, 1)
    assert tokens_of(await running) == list(range(103, 103 + NUM_TOKENS))


@in_a_loop
async def test_a_request_that_ends_while_it_is_to_be_moved_wasnt_moved() -> None:
    late = Latecomer()
    router = Router({"target-0": late, "target-1": Successor()})
    running, draining = await aborted_unheard(late, router)
    late.go_on()
    late.heard.set()
    drained = await asyncio.wait_for(draining, 5)
    assert (drained.finished, drained.moved) == (1, 0)
    assert len(tokens_of(await running)) == NUM_TOKENS
    assert router.moves == 0
