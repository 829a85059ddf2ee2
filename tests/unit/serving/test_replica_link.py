"""A gateway's stream with a replica: real gRPC between the two ends, and a scripted engine behind it."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from dspark.v1 import replica_pb2 as pb
from dspark.v1 import replica_pb2_grpc as pb_grpc

from cluster.serving import wire
from cluster.serving.auth import METADATA_KEY, SCHEME
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.errors import RequestError, invalid
from cluster.serving.replica_link import ReplicaLink
from cluster.serving.replica_server import STREAM_OPTIONS, Generate, ReplicaAddress, ReplicaServer
from cluster.serving.types import (
    ChoiceDelta,
    FinishReason,
    PositionLogprobs,
    Request,
    RoundFigures,
    Sampling,
    TokenLogprob,
    TokenPrompt,
)
from cluster.serving.waiting import WaitingDeltas
from cluster.speculation.figures import AcceptanceFigures
from tests.serving.scripted_engine import ScriptedEngine
from tests.unit.test_router import in_a_loop

DEADLINE_S = 20
PROMPT = (7, 8)
REQUEST = Request(prompt=TokenPrompt(token_ids=PROMPT), request_id="a")


def delta(*tokens: int, index: int = 0, text: str = "t", last: FinishReason | None = None) -> EngineDelta:
    """Of one round for each token, whose draft was accepted."""
    rounds = RoundFigures(
        acceptance=AcceptanceFigures(rounds=len(tokens), drafted=len(tokens), accepted_by_position=(len(tokens),)),
        rounds_without_draft=1,
    )
    choice = ChoiceDelta(index=index, text=text, token_ids=tokens, finish_reason=last, speculation=rounds)
    return EngineDelta(choices=(choice,), cached_tokens=1)


async def counting(
    name: str, request: Request, prompt: tuple[int, ...], most: int
) -> AsyncGenerator[EngineDelta, None]:
    """As many tokens as asked for, from the prompt's last one on; each request at a pace of its own."""
    assert (name, prompt) == (request.request_id, PROMPT)
    for position in range(most):
        await asyncio.sleep(0.001 * (int(name) % 3))
        yield delta(prompt[-1] + int(name) + position, last=FinishReason.LENGTH if position == most - 1 else None)


@asynccontextmanager
async def listening(generate: Generate) -> AsyncIterator[ReplicaAddress]:
    server = ReplicaServer(generate)
    try:
        yield await server.start("127.0.0.1")
    finally:
        await server.stop()


@asynccontextmanager
async def linked(generate: Generate) -> AsyncIterator[ReplicaLink]:
    async with listening(generate) as address:
        link = ReplicaLink(address)
        try:
            yield link
        finally:
            link.close()


async def collected(link: ReplicaLink, name: str = "a", most: int = 5) -> list[EngineDelta]:
    return [each async for each in link.generate(name, REQUEST, PROMPT, most)]


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def tokens_of(deltas: list[EngineDelta]) -> list[int]:
    return [token for each in deltas for choice in each.choices for token in choice.token_ids]


def test_what_waits_becomes_one_delta() -> None:
    logprobs = (PositionLogprobs(token=TokenLogprob(token_id=1, text="x", logprob=-1.0, rank=1), top=()),)
    waiting = WaitingDeltas()
    assert waiting.take() is None
    alone = EngineDelta(choices=(ChoiceDelta(index=0, text="a"),), cached_tokens=0, prompt_logprobs=logprobs)
    waiting.add(alone)
    assert waiting.take() is alone
    for each in (alone, delta(1, index=1), delta(2, text="u"), delta(3, text="v", last=FinishReason.LENGTH)):
        waiting.add(each)
    joined = waiting.take()
    assert joined is not None
    assert joined.prompt_logprobs == logprobs
    assert joined.choices == (
        ChoiceDelta(
            index=0,
            text="auv",
            token_ids=(2, 3),
            finish_reason=FinishReason.LENGTH,
            speculation=RoundFigures(
                acceptance=AcceptanceFigures(rounds=2, drafted=2, accepted_by_position=(2,)), rounds_without_draft=2
            ),
        ),
        *delta(1, index=1).choices,
    )
    assert waiting.take() is None


@in_a_loop
async def test_each_generation_gets_its_own() -> None:
    async with linked(counting) as link:
        names = [str(index) for index in range(16)]
        answers = await asyncio.gather(*(collected(link, name, most=20) for name in names))
    for name, deltas in zip(names, answers, strict=True):
        first = PROMPT[-1] + int(name)
        assert tokens_of(deltas) == list(range(first, first + 20))
        assert [each.choices[0].finish_reason for each in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
        figures = [each.choices[0].speculation for each in deltas]
        assert sum(each.acceptance.accepted for each in figures if each is not None) == 20
        assert sum(each.rounds_without_draft for each in figures if each is not None) == 20


@in_a_loop
async def test_a_request_arrives_as_it_was_sent() -> None:
    asked: list[Any] = []

    async def generate(*arguments: Any) -> AsyncGenerator[EngineDelta, None]:
        asked.append(arguments)
        yield delta(1)

    sampling = Sampling(n=2, temperature=0.5, seed=1 << 40, logit_bias=((3, 0.25),))
    request = Request(prompt=TokenPrompt(token_ids=PROMPT), request_id="x", sampling=sampling, priority=-2)
    async with linked(generate) as link:
        assert [each async for each in link.generate("x", request, PROMPT, 9)] == [delta(1)]
    assert asked == [("x", request, PROMPT, 9)]


@in_a_loop
async def test_one_delta_waits_for_a_slow_client() -> None:
    engine = ScriptedEngine()
    async with linked(engine.generate) as link:
        stream = link.generate("a", REQUEST, PROMPT, 1_000)
        first = await anext(stream)
        await collected(link, "b", most=1_000)
        await until(lambda: engine.closed == ["a", "b"])
        await collected(link, "c", most=1)  # by then what was sent before has come
        rest = [each async for each in stream]
    assert len(rest) == 1
    assert len(tokens_of([first, *rest])) == 1_000


@in_a_loop
async def test_one_delta_waits_for_a_slow_gateway() -> None:
    """Which has stopped to read: what the connection takes is sent, the rest becomes one message."""
    text, ended = "t" * 1_000, asyncio.Event()

    async def generate(*_: Any) -> AsyncGenerator[EngineDelta, None]:
        for token in range(10_000):
            yield delta(token, text=text)
            await asyncio.sleep(0)
        ended.set()

    async with (
        listening(generate) as address,
        grpc.aio.insecure_channel(address.address, options=STREAM_OPTIONS) as channel,
    ):
        stub: Any = pb_grpc.ReplicaServiceStub(channel)
        call = stub.Attach(metadata=((METADATA_KEY, f"{SCHEME}{address.token}"),))
        start = pb.StartGeneration(generation=1, request=wire.encode_request(REQUEST), max_tokens=1)
        await call.write(pb.AttachRequest(start=start))
        await asyncio.wait_for(ended.wait(), DEADLINE_S)
        messages, tokens = 0, list[int]()
        while True:
            (update,) = (await call.read()).updates
            messages += 1
            tokens += (token for choice in update.choices for token in choice.token_ids)
            if update.HasField("end"):
                break
        call.cancel()
    assert tokens == list(range(10_000))
    assert messages < 5_000


@in_a_loop
async def test_a_client_that_goes_ends_its_generation_alone() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with linked(engine.generate) as link:
        streams = [link.generate(name, REQUEST, PROMPT, 5) for name in ("a", "b")]
        for stream in streams:
            await anext(stream)
        await streams[0].aclose()
        await until(lambda: engine.closed == ["a"])
        assert engine.running == ["b"]
        engine.go()
        assert len(tokens_of([each async for each in streams[1]])) == 4


@in_a_loop
async def test_a_gateway_that_goes_ends_its_generations() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with listening(engine.generate) as address:
        gone, other = ReplicaLink(address), ReplicaLink(address)
        streams = [link.generate(name, REQUEST, PROMPT, 5) for link, name in ((gone, "a"), (gone, "b"), (other, "c"))]
        for stream in streams:
            await anext(stream)
        gone.close()
        await until(lambda: sorted(engine.closed) == ["a", "b"])
        assert engine.running == ["c"]
        with pytest.raises(EngineDeadError):
            await anext(streams[0])
        other.close()
        await until(lambda: engine.running == [])


@in_a_loop
async def test_a_replica_that_goes_ends_its_streams() -> None:
    engine = ScriptedEngine()
    engine.hold()
    async with listening(engine.generate) as address:
        link = ReplicaLink(address)
        stream = link.generate("a", REQUEST, PROMPT, 5)
        await anext(stream)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(anext(stream), DEADLINE_S)
    assert link.closed
    with pytest.raises(EngineDeadError):
        await collected(link)


@pytest.mark.parametrize(
    ("raised", "expected", "match"),
    [
        (invalid("sampling.seed", "it is odd"), RequestError, "^sampling.seed: it is odd$"),
        (EngineDeadError("here"), EngineDeadError, "engine has died"),
        (ZeroDivisionError(), RequestError, "failed this request"),
    ],
)
@in_a_loop
async def test_failures_come_after_what_was_made(raised: Exception, expected: type[Exception], match: str) -> None:
    async def generate(*_: Any) -> AsyncGenerator[EngineDelta, None]:
        yield delta(1)
        raise raised

    async with linked(generate) as link:
        stream = link.generate("a", REQUEST, PROMPT, 5)
        assert await anext(stream) == delta(1)
        with pytest.raises(expected, match=match) as failure:
            await anext(stream)
    if isinstance(raised, RequestError):
        assert isinstance(failure.value, RequestError)
        assert (failure.value.status, failure.value.field) == (raised.status, raised.field)


@in_a_loop
async def test_nobody_is_let_in_without_the_secret() -> None:
    engine = ScriptedEngine()
    async with listening(engine.generate) as address:
        link = ReplicaLink(ReplicaAddress(address=address.address, token="guessed"))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(collected(link), DEADLINE_S)
    assert engine.closed == []
