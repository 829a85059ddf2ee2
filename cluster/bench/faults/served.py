"""The rows of a server: more is asked of it than it can do, and it is told to end under load."""

import asyncio
import math
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.bench.faults.figures import Figure, Row, ms
from cluster.bench.faults.load import Tokens
from cluster.bench.load.generator import Load, LoadGenerator, LoadProgress
from cluster.bench.load.records import LoadResult, RequestRecord
from cluster.client import AsyncClient, GenerationError, Request, Response, Sampling, Stopping, TokenPrompt
from cluster.engine.in_process import GenerationRequest
from cluster.errors import UserError
from cluster.serving.service import SERVICE_NAME

OVERLOAD: Final = 2
"""Times the requests a second of a server that is always just full."""

REFUSAL_BAR_S: Final = 0.05
NOT_SERVING_BAR_S: Final = 0.1

LATENCY_BAR: Final = 1.1
"""Of what is admitted under overload, over that of a server that is just full: medians."""

_MAX_RUNNING: Final = 8
_REFUSED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED.name

_START_TIMEOUT_S: Final = 300.0
"""To import vLLM and to load, in two processes, on a machine that does other things."""

_STOP_TIMEOUT_S: Final = 60.0


class Served:
    """`dspark-cluster serve` of a target alone, in a process that starts when the first row needs it: who is admitted
    and who is refused doesn't depend on drafts.

    Nothing waits there: what doesn't run is refused, so that the latency of what does is the engine's own.
    """

    def __init__(self, target: str, requests: Sequence[GenerationRequest], expected: Sequence[Tokens]) -> None:
        """`expected` are the right answers to `requests`, which are greedy."""
        options = ["--target", target, "--max-model-len", "128", "--port", "0"]
        places = ["--max-running", str(_MAX_RUNNING), "--max-queued", "0"]
        self._command = [sys.executable, "-m", "cluster.cli", "serve", *options, *places]
        self._requests = list(map(to_request, requests))
        self._expected = expected
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(_STOP_TIMEOUT_S)
        self._log.close()

    def overload(self) -> Row:
        """As many requests as keep it full, then more: what is admitted is to take as long as before."""
        self._running()
        begun = time.monotonic()
        full = asyncio.run(self._load(self._requests, rate=math.inf, concurrency=_MAX_RUNNING))
        rate = OVERLOAD * len(full.records) / full.duration_s
        over = asyncio.run(self._load(OVERLOAD * self._requests, rate=rate, concurrency=None))
        admitted = [record for record in over.records if not record.error]
        refused = [record for record in over.records if record.error.startswith(_REFUSED)]
        failed = len(over.records) - len(admitted) - len(refused) + sum(bool(record.error) for record in full.records)
        slowest_s = max((record.e2el_s for record in refused), default=0.0)
        return Row(
            fault=f"{OVERLOAD} times a server's capacity",
            requests=len(full.records) + len(over.records),
            figures=(
                Figure.some("admitted", len(admitted)),
                Figure.some("refused", len(refused)),
                Figure.none("failed", failed),
                Figure(name="refused within", value=ms(slowest_s), is_met=slowest_s <= REFUSAL_BAR_S),
                _latency("first token", full.records, admitted, lambda record: record.ttft_s),
                _latency("a later token", full.records, admitted, lambda record: record.tpot_s),
            ),
            seconds=time.monotonic() - begun,
        )

    def told_to_end(self) -> Row:
        """SIGTERM while requests run."""
        process = self._running()
        begun = time.monotonic()
        requests = self._requests[:_MAX_RUNNING]
        took_s, answers = asyncio.run(self._end(process, requests))
        failed = sum(answer != right for answer, right in zip(answers, self._expected[: len(requests)], strict=True))
        code = process.wait(_STOP_TIMEOUT_S)
        return Row(
            fault="server told to end",
            requests=len(requests),
            figures=(
                Figure(name="NOT_SERVING after", value=ms(took_s), is_met=took_s <= NOT_SERVING_BAR_S),
                Figure.none("failed or not exact", failed),
                Figure.none("exit code", code),
            ),
            seconds=time.monotonic() - begun,
        )

    def _running(self) -> "subprocess.Popen[bytes]":
        """The server; started, if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._log)
            self._address = self._await_address(self._process)
            asyncio.run(self._load(self._requests[:_MAX_RUNNING], rate=math.inf, concurrency=None))  # warms it up
        return self._process

    def _await_address(self, process: "subprocess.Popen[bytes]") -> str:
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout)
        line = process.stdout.readline().decode() if poll.poll(1e3 * _START_TIMEOUT_S) else ""
        if not line:
            self._log.seek(0)
            last = (self._log.read().decode(errors="replace").splitlines() or ["it says nothing"])[-1]
            raise UserError("the server's process", f"it does not serve ({last})", "try `dspark-cluster serve` by hand")
        return line.split(" on ")[-1].split(";")[0]

    async def _load(self, requests: Sequence[Request], *, rate: float, concurrency: int | None) -> LoadResult:
        load = Load(
            requests=tuple(requests),
            request_rate=rate,
            burstiness=1.0,
            concurrency=concurrency,
            ramp_up_s=0.0,
            seed=0,
            request_timeout_s=None,
        )
        async with AsyncClient(self._address) as client:
            return await LoadGenerator(client, load, LoadProgress(total=len(requests))).run()

    async def _end(self, process: "subprocess.Popen[bytes]", requests: Sequence[Request]) -> tuple[float, list[Tokens]]:
        """Seconds from the signal, which comes when all requests run, to NOT_SERVING; and their answers."""
        async with AsyncClient(self._address) as client, grpc.aio.insecure_channel(self._address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            await watch.read()
            streams = [client.stream(request) for request in requests]
            firsts = await asyncio.gather(*map(anext, streams))
            signalled = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await watch.read()  # it says what changes
            took_s = time.monotonic() - signalled
            watch.cancel()
            return took_s, await asyncio.gather(*map(_tokens, firsts, streams))


def to_request(request: GenerationRequest) -> Request:
    """As a server is asked for it."""
    return Request(
        prompt=TokenPrompt(token_ids=request.prompt_token_ids),
        sampling=Sampling(temperature=request.temperature),
        stopping=Stopping(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos),
    )


async def _tokens(first: Response, rest: AsyncGenerator[Response, None]) -> Tokens:
    tokens = list(first.choices[0].token_ids)
    with suppress(GenerationError):  # cut off: then there are too few
        async for response in rest:
            tokens += response.choices[0].token_ids
    return tuple(tokens)


def _latency(
    name: str,
    full: Sequence[RequestRecord],
    over: Sequence[RequestRecord],
    of: Callable[[RequestRecord], float | None],
) -> Figure:
    before_s, now_s = (statistics.median(seconds for each in some if (seconds := of(each))) for some in (full, over))
    value = f"{ms(now_s)}, {ms(before_s)} at capacity"
    return Figure(name=name, value=value, is_met=now_s <= LATENCY_BAR * before_s)
