"""A request that is cancelled, late or aborted ends in the engine too, and its KV blocks are free again."""

import asyncio
import time

import grpc
import pytest

from cluster.client import AsyncClient, Client, FinishReason, GenerationError, Response, join_responses
from cluster.engine.async_engine import AsyncEngine
from cluster.engine.in_process import InProcessEngine
from cluster.serving.server import GenerationServer
from tests.serving.loop import LoopThread
from tests.serving.requests import SHORT, alone_request, greedy

STREAMS = 32
DEADLINE_S = 20.0


def all_blocks_are_free(engine: AsyncEngine, loop: LoopThread) -> bool:
    """vLLM resets its prefix cache only where no request holds a block."""
    return bool(loop.run(engine.vllm_engine.reset_prefix_cache()))


def assert_all_blocks_are_freed(engine: AsyncEngine, loop: LoopThread) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all_blocks_are_free(engine, loop):
        assert time.monotonic() < deadline, "blocks are still held"


def test_concurrent_streams_with_one_in_four_cancelled_are_what_the_target_alone_makes(
    server: GenerationServer, engine: AsyncEngine, loop: LoopThread, alone: InProcessEngine
) -> None:
    prompts = [tuple(range(start, start + 5 + start % 7)) for start in range(10, 10 + 9 * STREAMS, 9)]
    expected = alone.generate([alone_request(prompt, 10) for prompt in prompts])

    async def stream(client: AsyncClient, index: int) -> Response | None:
        cancelled = index % 4 == 0
        responses = []
        deltas = client.stream(greedy(prompts[index], 200 if cancelled else 10))
        async for response in deltas:
            responses.append(response)
            if cancelled and len(responses) == 2:
                await deltas.aclose()
                return None
        return join_responses(responses)

    async def streams() -> list[Response | None]:
        async with AsyncClient(server.address) as client:
            return await asyncio.gather(*(stream(client, index) for index in range(STREAMS)))

    answers = asyncio.run(streams())
    assert [answer is None for answer in answers] == [index % 4 == 0 for index in range(STREAMS)]
    for answer, alone_answer in zip(answers, expected, strict=True):
        if answer is not None:
            assert answer.choices[0].token_ids == alone_answer.token_ids
            assert answer.choices[0].text == alone_answer.text
    assert_all_blocks_are_freed(engine, loop)


def test_a_deadline_ends_the_request_and_frees_its_blocks(
    client: Client, engine: AsyncEngine, loop: LoopThread
) -> None:
    with pytest.raises(GenerationError) as failure:
        client.generate(greedy(SHORT, 500), timeout_s=1.0)
    assert failure.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_all_blocks_are_freed(engine, loop)


def test_abort_ends_a_stream_with_its_reason_and_frees_its_blocks(
    client: Client, engine: AsyncEngine, loop: LoopThread
) -> None:
    stream = client.stream(greedy(SHORT, 400, request_id="long", sampling={"temperature": 1.0, "n": 2}))
    first = next(stream)
    assert not all_blocks_are_free(engine, loop)
    assert client.abort(["long", "unknown", "long"]) == ["long"]
    answer = join_responses([first, *stream])
    assert [choice.finish_reason for choice in answer.choices] == [FinishReason.ABORTED] * 2
    assert client.abort(["long"]) == []
    assert_all_blocks_are_freed(engine, loop)
