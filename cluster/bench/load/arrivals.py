"""When requests are due."""

import math
import random


def due_times(
    count: int, *, rate: float, burstiness: float, concurrency: int | None, ramp_up_s: float, seed: int
) -> list[float]:
    """Seconds from the start, ascending, for `count` requests.

    `rate` a second with gamma-distributed gaps, as `vllm bench serve` has them: `burstiness` is their shape, 1 a
    Poisson process, less is burstier, more is steadier. An infinite rate asks for all at once.

    In the first `ramp_up_s` the rate grows linearly from 0; with an infinite rate, one place after the other opens.
    """
    if math.isinf(rate):
        places = min(count, concurrency or count)
        return [ramp_up_s * min(index, places) / places for index in range(count)]
    source = random.Random(seed)
    due, now_s = list[float](), 0.0
    for _ in range(count):
        due.append(_ramped(now_s, ramp_up_s))
        now_s += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return due


def _ramped(seconds: float, ramp_up_s: float) -> float:
    """The time at which a rate that grows for `ramp_up_s` has asked for as much as the full one after `seconds`."""
    half = ramp_up_s / 2
    return math.sqrt(2 * ramp_up_s * seconds) if seconds < half else seconds + half
