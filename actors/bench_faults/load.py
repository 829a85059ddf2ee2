"""A load on a cluster, something that happens in its middle, and what its clients saw of that."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import grpc

from cluster.bench.faults.load import Tokens
from cluster.client import Client, GenerationError, Request

_AGAIN_AFTER_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To one request. `error` is empty where it came to its end; `repeats` counts how often it was asked again."""

    tokens: Tokens
    longest_gap_s: float
    error: str = ""
    repeats: int = 0


def ask(
    address: str,
    requests: Sequence[Request],
    event: Callable[[], None] = lambda: None,
    *,
    at_once: int,
    patience_s: float = 0.0,
) -> list[Answer]:
    """Ask them all; the event happens when a sixth has ended, so that much runs then also where this process is late. A
    request whose connection is lost is repeated, under its id, for `patience_s`."""
    with Client(address) as client, ThreadPoolExecutor(at_once) as pool:
        answers = [pool.submit(_ask_one, client, request, patience_s) for request in requests]
        for ended, _ in enumerate(as_completed(answers), start=1):
            if ended == max(1, len(answers) // 6):
                event()
        return [answer.result() for answer in answers]


def ask_anew(address: str, request: Request, *, patience_s: float) -> Answer:
    """As a client that comes now, with a request of its own."""
    with Client(address) as client:
        return _ask_one(client, replace(request, request_id=""), patience_s)


def failed(answers: Sequence[Answer], right: Sequence[Answer]) -> int:
    """Requests without an end, or with other tokens than they should have."""
    pairs = zip(answers, right, strict=True)
    return sum(bool(answer.error) or answer.tokens != expected.tokens for answer, expected in pairs)


def longest_gap_s(answers: Sequence[Answer]) -> float:
    return max(answer.longest_gap_s for answer in answers)


def _ask_one(client: Client, request: Request, patience_s: float) -> Answer:
    deadline_s = time.monotonic() + patience_s
    repeats = 0
    while True:
        tokens: list[int] = []
        times: list[float] = []
        error = ""
        try:
            for response in client.stream(request):
                tokens += response.choices[0].token_ids
                times.append(time.monotonic())
        except GenerationError as failure:
            error = str(failure)
            if failure.status is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline_s:
                repeats += 1
                time.sleep(_AGAIN_AFTER_S)
                continue
        gap_s = max((later - one for one, later in pairwise(times)), default=0.0)
        return Answer(tokens=tuple(tokens), longest_gap_s=gap_s, error=error, repeats=repeats)
