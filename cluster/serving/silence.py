"""A neighbour that is silent, told from one that this process hadn't the time to hear."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

_TURN_S: Final = 0.1


async def heard(answer: Awaitable[T], silent_s: float, signs_of_life: Callable[[], int]) -> T:
    """The answer, however late, as long as the neighbour gives signs of life: a number that grows.

    Time is counted in turns of this event loop. One that was late, for want of a core, is one turn all the same: what
    came meanwhile is read only in the next.

    Raises:
        TimeoutError: neither answer nor sign has come in so many seconds.
    """
    waiting = asyncio.ensure_future(answer)
    quiet_s, signs = 0.0, signs_of_life()
    try:
        while not waiting.done():
            if quiet_s >= silent_s:
                raise TimeoutError
            await asyncio.wait([waiting], timeout=_TURN_S)
            quiet_s += _TURN_S
            if (now := signs_of_life()) != signs:
                quiet_s, signs = 0.0, now
        return waiting.result()
    finally:
        waiting.cancel()
