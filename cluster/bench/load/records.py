"""What a run of a load measured: each request as its client saw it, and the client's own effort."""

from dataclasses import dataclass

from cluster.speculation.figures import AcceptanceFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times in seconds; those from `ttft_s` on count from its sending.

    `error` is empty for one that was answered. `itl_s` are the gaps between messages, each of a token or more.
    """

    index: int
    due_s: float
    """When it should have come, from the run's start."""
    late_s: float
    """How much later the generator woke for it."""
    queue_s: float
    """How long it waited here for a place within the concurrency."""
    sent_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    e2el_s: float = 0.0
    itl_s: tuple[float, ...] = ()
    error: str = ""
    acceptance: AcceptanceFigures | None = None
    rounds_without_draft: int = 0

    @property
    def tpot_s(self) -> float | None:
        """A token's time after the first one's; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The generator's own effort in a run."""

    cpu_share: float
    """Of one core, by the thread that sends and receives everything."""
    lag_p99_s: float
    """By which that thread woke too late, sampled all the time."""
    lag_max_s: float
    late_p99_s: float
    """By which requests were due before they were noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """`duration_s` runs from the first request's due time to the last one's end."""

    duration_s: float
    peak_concurrency: int
    records: tuple[RequestRecord, ...]
    overhead: Overhead
