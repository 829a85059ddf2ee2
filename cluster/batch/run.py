"""The lines of a batch, so many at once, each to its answer or its failure."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from cluster.batch.lines import BatchLine
from cluster.batch.output import BatchOutput
from cluster.batch.retry import retry_wait_s
from cluster.batch.tally import Tally
from cluster.client import ChoiceDelta, FinishReason, GenerationError, Request, Response
from cluster.contract.codec import to_plain

_JITTER: Final = 0.25
"""Of a wait, added to it: what was refused together shouldn't come back together."""

ABORTED: Final = "ABORTED"
"""The status of a line that somebody's Abort has ended."""


class Generates(Protocol):
    """What is needed of `AsyncClient`."""

    async def generate(self, request: Request, *, timeout_s: float | None = None) -> Response:
        """The whole output, or GenerationError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """`concurrency` lines run at once; each attempt may take `request_timeout_s`; `patience_s` is for repetitions of a
    line, from its first failure on."""

    concurrency: int
    request_timeout_s: float | None = None
    patience_s: float


class BatchRun:
    """One run over lines that have no answer yet. `tally` grows with it."""

    def __init__(
        self,
        client: Generates,
        output: BatchOutput,
        options: RunOptions,
        tally: Tally,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._output = output
        self._options = options
        self._tally = tally
        self._clock = clock
        self._sleep = sleep
        self._answered_s = clock()
        self._given_up = False

    @property
    def given_up(self) -> bool:
        """Whether the server was away for so long that the rest wasn't tried."""
        return self._given_up

    async def run(self, lines: Iterable[BatchLine]) -> None:
        """Return when each line has ended, or the server is given up.

        Raises:
            UserError: the output can't be written.
        """
        waiting = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(self._work(waiting))
        except ExceptionGroup as failures:
            # One is enough: the group has ended the others for it.
            raise failures.exceptions[0] from failures

    async def _work(self, waiting: Iterable[BatchLine]) -> None:
        for line in waiting:
            try:
                response = await self._ask(line)
            except GenerationError as error:
                self._fail(line, error.status.name, error.details)
            else:
                if any(choice.finish_reason is FinishReason.ABORTED for choice in response.choices):
                    self._fail(line, ABORTED, "ended by Abort")
                else:
                    self._output.append(line, _plain(response))
                    self._tally.add(response)
                    self._answered_s = self._clock()
            if self._given_up:
                return

    async def _ask(self, line: BatchLine) -> Response:
        """The answer; the last failure, where patience ends."""
        attempt = 0
        first_failure_s: float | None = None
        while True:
            try:
                return await self._client.generate(line.request, timeout_s=self._options.request_timeout_s)
            except GenerationError as error:
                attempt += 1
                now_s = self._clock()
                first_failure_s = now_s if first_failure_s is None else first_failure_s
                wait_s = retry_wait_s(error, attempt)
                if wait_s is None or self._given_up:
                    raise
                if now_s + wait_s - first_failure_s > self._options.patience_s:
                    # A full queue moves; a server that has answered nobody in all this time is away.
                    away = error.status is grpc.StatusCode.UNAVAILABLE and self._answered_s <= first_failure_s
                    self._given_up |= away
                    raise
            self._tally.retries += 1
            await self._sleep(wait_s * random.uniform(1.0, 1.0 + _JITTER))

    def _fail(self, line: BatchLine, status: str, why: str) -> None:
        self._output.fail(line, status, why)
        self._tally.failed[status] += 1


def _plain(response: Response) -> dict[str, Any]:
    """As a line of the output has it."""
    plain = {"choices": [_plain_choice(choice) for choice in response.choices], "usage": to_plain(response.usage)}
    if response.seed is not None:
        plain["seed"] = response.seed
    if response.prompt_logprobs:
        plain["prompt_logprobs"] = to_plain(response.prompt_logprobs)
    return plain


def _plain_choice(choice: ChoiceDelta) -> dict[str, Any]:
    speculation = choice.speculation
    plain: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "matched_stop": choice.matched_stop,
        "speculation": None
        if speculation is None
        else speculation.acceptance.to_json() | {"rounds_without_draft": speculation.rounds_without_draft},
    }
    if choice.logprobs:
        plain["logprobs"] = to_plain(choice.logprobs)
    return plain
