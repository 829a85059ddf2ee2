"""The generator's own effort, measured while it works: figures of a generator that was busy are its own, not a
server's."""

import asyncio
import time
from typing import Final, Self

from cluster.bench.load.records import Overhead
from cluster.bench.percentiles import percentile

_PERIOD_S: Final = 0.01
"""How often the event loop is asked whether it is on time."""

MAX_CPU_SHARE: Final = 0.75
"""Beyond it, messages wait for the generator."""

MIN_LAG_S: Final = 0.01
"""Lags below this are the operating system's."""


class OverheadMeter:
    """Measures within its block, in the block's event loop."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def __aenter__(self) -> Self:
        self._begun_s, self._begun_cpu_s = time.perf_counter(), time.thread_time()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        self._seconds = time.perf_counter() - self._begun_s
        self._cpu_s = time.thread_time() - self._begun_cpu_s

    def overhead(self, late_s: list[float]) -> Overhead:
        """After the block. `late_s` of all requests."""
        lags = self._lags or [0.0]
        return Overhead(
            cpu_share=self._cpu_s / self._seconds,
            lag_p99_s=percentile(lags, 99),
            lag_max_s=max(lags),
            late_p99_s=percentile(late_s, 99),
        )

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_PERIOD_S)
            self._lags.append(max(0.0, time.perf_counter() - before - _PERIOD_S))


def bottleneck(overhead: Overhead, median_itl_s: float, max_lag_share: float) -> str | None:
    """Why figures of this run would be the generator's own, or None.

    A wake-up that is later than `max_lag_share` of the median gap between messages would be a part of what is measured.
    """
    if overhead.cpu_share > MAX_CPU_SHARE:
        return f"the generator was busy {overhead.cpu_share:.0%} of the time; at most {MAX_CPU_SHARE:.0%} is allowed"
    if overhead.lag_p99_s > max(MIN_LAG_S, max_lag_share * median_itl_s):
        late, gap = 1e3 * overhead.lag_p99_s, 1e3 * median_itl_s
        return f"the generator woke {late:.0f} ms late (99th percentile), and messages came every {gap:.0f} ms"
    return None
