"""Whom nobody has heard of, and whom nobody had the time to hear."""

import asyncio
import time

import pytest

from cluster.serving.silence import heard
from tests.unit.test_router import in_a_loop

SILENT_S = 0.3


async def answer_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "here"


@in_a_loop
async def test_an_answer_in_time() -> None:
    assert await heard(answer_after(0.0), SILENT_S, lambda: 0) == "here"


@in_a_loop
async def test_silence() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        await heard(answer_after(60), SILENT_S, lambda: 0)
    assert SILENT_S <= time.monotonic() - begun < 10


@in_a_loop
async def test_signs_of_life_are_as_good_as_an_answer() -> None:
    begun = time.monotonic()
    assert await heard(answer_after(4 * SILENT_S), SILENT_S, lambda: int(20 * (time.monotonic() - begun))) == "here"


@in_a_loop
async def test_a_process_that_stood_still_listens_before_it_judges() -> None:
    asyncio.get_running_loop().call_later(0.01, time.sleep, 2 * SILENT_S)
    assert await heard(answer_after(SILENT_S), SILENT_S, lambda: 0) == "here"


@in_a_loop
async def test_what_the_neighbour_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await heard(fail(), SILENT_S, lambda: 0)
