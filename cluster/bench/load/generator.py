"""The load generator: requests sent when they are due, as many at once as allowed, each message's time taken."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from cluster.bench.load.arrivals import due_times
from cluster.bench.load.overhead import OverheadMeter
from cluster.bench.load.records import LoadResult, RequestRecord
from cluster.client import FinishReason, GenerationError, Request, Response
from cluster.speculation.figures import AcceptanceFigures


class Streams(Protocol):
    """What is needed of `AsyncClient`."""

    def stream(self, request: Request, *, timeout_s: float | None = None) -> AsyncGenerator[Response, None]:
        """Deltas as they come, or GenerationError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run. `request_rate` a second, infinity for all at once; `concurrency` None has no bound."""

    requests: tuple[Request, ...]
    request_rate: float
    burstiness: float
    concurrency: int | None
    ramp_up_s: float
    seed: int
    request_timeout_s: float | None


@dataclass(slots=True, kw_only=True)
class LoadProgress:
    """How far a run is."""

    total: int
    ended: int = 0
    failed: int = 0
    output_tokens: int = 0


class LoadGenerator:
    """One run of a load, in one event loop."""

    def __init__(self, client: Streams, load: Load, progress: LoadProgress) -> None:
        self._client = client
        self._load = load
        self._progress = progress
        self._running = 0
        self._peak = 0

    async def run(self) -> LoadResult:
        """When every request has ended. One that fails is a record with its error."""
        load = self._load
        due = due_times(
            len(load.requests),
            rate=load.request_rate,
            burstiness=load.burstiness,
            concurrency=load.concurrency,
            ramp_up_s=load.ramp_up_s,
            seed=load.seed,
        )
        places = asyncio.Semaphore(load.concurrency or len(load.requests))
        async with OverheadMeter() as meter:
            begun_s = time.perf_counter()
            records = await asyncio.gather(
                *(self._one(index, request, begun_s, due[index], places) for index, request in enumerate(load.requests))
            )
            ended_s = time.perf_counter()
        return LoadResult(
            duration_s=ended_s - begun_s - due[0],
            peak_concurrency=self._peak,
            records=tuple(records),
            overhead=meter.overhead([record.late_s for record in records]),
        )

    async def _one(
        self, index: int, request: Request, begun_s: float, due_s: float, places: asyncio.Semaphore
    ) -> RequestRecord:
        await asyncio.sleep(begun_s + due_s - time.perf_counter())
        woke_s = time.perf_counter() - begun_s
        async with places:
            self._running += 1
            self._peak = max(self._peak, self._running)
            sent_s = time.perf_counter() - begun_s
            blank = RequestRecord(
                index=index, due_s=due_s, late_s=max(0.0, woke_s - due_s), queue_s=sent_s - woke_s, sent_s=sent_s
            )
            record = await self._answered(request, blank)
            self._running -= 1
        self._progress.ended += 1
        self._progress.failed += bool(record.error)
        self._progress.output_tokens += record.output_tokens
        return record

    async def _answered(self, request: Request, blank: RequestRecord) -> RequestRecord:
        sent_s = time.perf_counter()
        times, last, aborted = list[float](), None, False
        acceptance: AcceptanceFigures | None = None
        without_draft = 0
        try:
            async with aclosing(self._client.stream(request, timeout_s=self._load.request_timeout_s)) as stream:
                async for last in stream:
                    if any(choice.token_ids for choice in last.choices):
                        times.append(time.perf_counter() - sent_s)
                    for choice in last.choices:
                        aborted |= choice.finish_reason is FinishReason.ABORTED
                        if choice.speculation is not None:
                            gained = choice.speculation.acceptance
                            acceptance = gained if acceptance is None else acceptance + gained
                            without_draft += choice.speculation.rounds_without_draft
        except GenerationError as error:
            return replace(blank, e2el_s=time.perf_counter() - sent_s, error=str(error))
        if last is None or not times or aborted:
            return replace(blank, e2el_s=time.perf_counter() - sent_s, error="ended without its answer")
        return replace(
            blank,
            prompt_tokens=last.usage.prompt_tokens,
            output_tokens=last.usage.completion_tokens,
            ttft_s=times[0],
            e2el_s=times[-1],
            itl_s=tuple(after - before for before, after in pairwise(times)),
            acceptance=acceptance,
            rounds_without_draft=without_draft,
        )


async def run_load(client: Streams, load: Load, tell: Callable[[LoadProgress], None], period_s: float) -> LoadResult:
    """Run it, and `tell` every `period_s` how far it is."""
    progress = LoadProgress(total=len(load.requests))

    async def report() -> None:
        while True:
            await asyncio.sleep(period_s)
            tell(progress)

    telling = asyncio.create_task(report())
    try:
        return await LoadGenerator(client, load, progress).run()
    finally:
        telling.cancel()
