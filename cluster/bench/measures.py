"""Figures of one run, by the names of `vllm bench serve` where it has one."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.bench.load.records import LoadResult, RequestRecord
from cluster.bench.percentiles import percentile
from cluster.errors import UserError
from cluster.speculation.figures import AcceptanceFigures

PERCENTILES: Final = (90, 95, 99)
LATENCIES: Final = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token after it, inter-token latency (between messages), end-to-end latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Service-level objectives, in milliseconds by latency: a request that meets all of them is a good one."""

    objectives: Mapping[str, float]

    def met_by(self, record: RequestRecord) -> bool:
        taken = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
        return all(1e3 * taken[name] <= limit for name, limit in self.objectives.items())


def parse_goodput(texts: Sequence[str]) -> Goodput | None:
    """`ttft:500`, `tpot:50`, `e2el:3000`, in milliseconds. None where there is none. Raises UserError."""
    objectives = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            objectives[name] = 0.0
        if name not in ("ttft", "tpot", "e2el") or not objectives[name] > 0:
            raise UserError(f"--goodput {text}", "it is no objective", "write ttft:, tpot: or e2el: and milliseconds")
    return Goodput(objectives=objectives) if objectives else None


def measure(result: LoadResult, goodput: Goodput | None) -> dict[str, float]:
    """Figures of the requests that were answered; throughputs are a second, latencies in milliseconds.

    Without an answer there are only the counts.
    """
    answered = [record for record in result.records if not record.error]
    seconds = result.duration_s
    figures: dict[str, float] = {
        "duration": seconds,
        "completed": len(answered),
        "failed": len(result.records) - len(answered),
        "max_concurrent_requests": result.peak_concurrency,
    }
    if not answered:
        return figures
    output = sum(record.output_tokens for record in answered)
    prompt = sum(record.prompt_tokens for record in answered)
    figures |= {
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(answered) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    if goodput is not None:
        figures["request_goodput"] = sum(map(goodput.met_by, answered)) / seconds
    for name, values in _latencies(answered).items():
        if values:
            figures |= _distribution(name, [1e3 * value for value in values])
    if "median_tpot_ms" in figures:
        figures["output_speed_per_user"] = 1e3 / figures["median_tpot_ms"]
    return figures


def acceptance_of(result: LoadResult) -> AcceptanceFigures | None:
    """Of all requests together; None where nothing was drafted."""
    known = [record.acceptance for record in result.records if record.acceptance is not None]
    return sum(known[1:], known[0]) if known else None


def median_itl_s(result: LoadResult) -> float:
    """0 where every answer came in one message."""
    gaps = [gap for record in result.records for gap in record.itl_s]
    return statistics.median(gaps) if gaps else 0.0


def _latencies(answered: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft": [record.ttft_s for record in answered],
        "tpot": [record.tpot_s for record in answered if record.tpot_s is not None],
        "itl": [gap for record in answered for gap in record.itl_s],
        "e2el": [record.e2el_s for record in answered],
        "client_queue_time": [record.queue_s for record in answered],
    }


def _distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    figures = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    return figures | {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}
