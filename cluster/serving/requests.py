"""A request's life: validated, given an id and a place, tokenized, run, ended. No gRPC call in sight."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc
from dspark.v1 import generation_pb2 as pb

from cluster.serving import logs
from cluster.serving.admission import Admission, QueueFullError, Ticket
from cluster.serving.engine import EngineDelta, GenerationEngine
from cluster.serving.errors import RequestError, invalid, unavailable
from cluster.serving.join import join_responses
from cluster.serving.limits import Limits
from cluster.serving.metrics import ServiceMetrics
from cluster.serving.types import ChoiceDelta, FinishReason, Request, Response, Usage
from cluster.serving.validate import check_lengths, validate


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A request that has its id and its place. `aborted` is set by `Requests.abort`, or by the same request again."""

    request: Request
    ticket: Ticket
    entered: float
    replaces: "Job | None" = None
    """The same request, sent before by a client that may have lost its connection."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Requests:
    """The requests of one engine. Every job that `enter` gives must be given to `leave`."""

    def __init__(self, engine: GenerationEngine, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits
        self._jobs: dict[str, Job] = {}
        self._left = asyncio.Event()
        self._draining = False
        self.admission = Admission(max_running=limits.max_running, max_queued=limits.max_queued)
        self.metrics = ServiceMetrics(self.admission)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def empty(self) -> bool:
        """Whether no request waits or runs."""
        return not self._jobs

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and return when the last has ended or the time is over."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._jobs:
                    self._left.clear()
                    await self._left.wait()

    def enter(self, message: pb.GenerateRequest) -> Job:
        """A job for the request. Raises RequestError, at once, where it is wrong or there is no room."""
        self._check_open()
        return self._admit([validate(message, self._engine.model, self._limits)])[0]

    def enter_batch(self, messages: Sequence[pb.GenerateRequest]) -> list[Job]:
        """Jobs for all of the requests, or for none."""
        self._check_open()
        if not 1 <= len(messages) <= self._limits.max_batch_requests:
            raise invalid(
                "requests", f"{len(messages):,} of them; 1 to {self._limits.max_batch_requests:,} make a batch"
            )
        requests = []
        for index, message in enumerate(messages):
            try:
                requests.append(validate(message, self._engine.model, self._limits))
            except RequestError as error:
                raise error.within(f"requests[{index}]") from error
        choices, most = sum(map(_choices, requests)), self._limits.max_running + self._limits.max_queued
        if choices > most:
            raise invalid("requests", f"{choices:,} choices; a batch may have at most {most:,}")
        return self._admit(requests)

    def leave(self, job: Job) -> None:
        """The job has ended, however that was. A second call does nothing."""
        if self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]
        job.left.set()
        self._left.set()
        self.admission.leave(job.ticket)

    async def run(self, job: Job) -> AsyncGenerator[Response, None]:
        """The job's responses. Closing the generator ends the request in the engine.

        Raises:
            RequestError: refused by the tokenizer or the engine, or failed in it.
            EngineDeadError: the engine has died.
        """
        if job.replaces is not None:
            await self._engine.abort([job.request_id])  # by its id, which this one has, too, from here on
            await job.replaces.left.wait()
        prompt = await self._engine.prepare(job.request)
        most = check_lengths(job.request, len(prompt), self._engine.model)
        await job.ticket.admitted.wait()
        self.metrics.admitted(time.monotonic() - job.entered)
        answer = _Answer(job.request, prompt_tokens=len(prompt))
        if not job.aborted.is_set():
            async with aclosing(self._engine.generate(job.request_id, job.request, prompt, most)) as deltas:
                async for delta in deltas:
                    yield answer.response(delta)
                    # Abort may have come before the engine knew the request.
                    if job.aborted.is_set():
                        break
        if answer.unfinished:
            yield answer.aborted()

    async def run_batch(self, jobs: Sequence[Job]) -> list[Response]:
        """Each job's responses joined into one; a failure ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_joined(index, job)) for index, job in enumerate(jobs)]
        except ExceptionGroup as failures:
            # One is enough: the group has ended the others for it.
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End those that wait or run, and say which they were."""
        jobs = [self._jobs[each] for each in dict.fromkeys(request_ids) if each in self._jobs]
        for job in jobs:
            _end(job)
        aborted = [job.request_id for job in jobs]
        if aborted:
            await self._engine.abort(aborted)
        return aborted

    async def _run_joined(self, index: int, job: Job) -> Response:
        try:
            async with aclosing(self.run(job)) as responses:
                return join_responses([response async for response in responses])
        except RequestError as error:
            raise error.within(f"requests[{index}]") from error
        finally:
            self.leave(job)  # others of its batch may wait for its place

    def _check_open(self) -> None:
        if self._draining:
            raise unavailable("the server is shutting down")
        if self._engine.dead:
            raise unavailable("there is no engine in service")

    def _admit(self, requests: Sequence[Request]) -> list[Job]:
        requests = [replace(each, request_id=each.request_id or uuid.uuid4().hex) for each in requests]
        ids = [each.request_id for each in requests]
        for index, request_id in enumerate(ids):
            earlier = self._jobs.get(request_id)
            if request_id in ids[:index] or (earlier is not None and earlier.request != requests[index]):
                why = f"{request_id} is in use"
                raise RequestError(grpc.StatusCode.ALREADY_EXISTS, "request_id", why)
        try:
            tickets = self.admission.enter([_choices(each) for each in requests])
        except QueueFullError as error:
            status = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise RequestError(status, "", str(error), retry_after_s=error.retry_after_s) from error
        now = time.monotonic()
        jobs = [
            Job(request=request, ticket=ticket, entered=now, replaces=self._jobs.get(request.request_id))
            for request, ticket in zip(requests, tickets, strict=True)
        ]
        for job in jobs:
            if job.replaces is not None:
                _end(job.replaces)
        self._jobs |= {job.request_id: job for job in jobs}
        for job in jobs:
            logs.event("request entered", request_id=job.request_id, choices=job.ticket.choices)
        return jobs


class _Answer:
    """A request's responses as they are made: what they count, and which choices have still to end."""

    def __init__(self, request: Request, *, prompt_tokens: int) -> None:
        self.unfinished = set(range(_choices(request)))
        self._request_id = request.request_id
        self._seed = request.sampling.seed
        self._usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=0)

    def response(self, delta: EngineDelta) -> Response:
        self.unfinished -= {choice.index for choice in delta.choices if choice.finish_reason is not None}
        tokens = self._usage.completion_tokens + sum(len(choice.token_ids) for choice in delta.choices)
        self._usage = replace(self._usage, cached_tokens=delta.cached_tokens, completion_tokens=tokens)
        seed, self._seed = self._seed, None  # in the first response alone
        return Response(
            request_id=self._request_id,
            choices=delta.choices,
            usage=self._usage,
            seed=seed,
            prompt_logprobs=delta.prompt_logprobs,
        )

    def aborted(self) -> Response:
        """The last response, where Abort has left choices without an end."""
        ended = [ChoiceDelta(index=index, finish_reason=FinishReason.ABORTED) for index in sorted(self.unfinished)]
        return self.response(EngineDelta(choices=tuple(ended), cached_tokens=self._usage.cached_tokens))


def _end(job: Job) -> None:
    """One that waits ends now; `leave` knows that it never ran."""
    job.aborted.set()
    job.ticket.admitted.set()


def _choices(request: Request) -> int:
    return request.sampling.n or 1
