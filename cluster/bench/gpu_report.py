"""What `cluster.bench.gpu` found: tables, and a JSON document."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from cluster.bench.dummy_pair import logits_bytes
from cluster.bench.environment import environment
from cluster.bench.gpu_arm import ArmFacts, Workload
from cluster.bench.gpu_arms import COLOCATED, Figures

_GIB: Final = 1 << 30


class GpuReport:
    """`figures` come one batch after the other, each of all arms."""

    def __init__(self, workload: Workload, facts: Mapping[str, ArmFacts]) -> None:
        """`facts` are by engine."""
        self.figures: list[Figures] = []
        self._workload = workload
        self._facts = facts
        self._logits = logits_bytes(workload.shape, workload.max_batch)
        self._environment = environment()

    def document(self) -> dict[str, Any]:
        return {
            "environment": self._environment,
            "workload": asdict(self._workload),
            "engines": {name: asdict(each) for name, each in self._facts.items()},
            "logits_bytes": self._logits,
            "runs": [self._as_plain(figure) for figure in self.figures],
        }

    def tables(self) -> Iterator[Table]:
        yield self._speeds()
        if any(figure.parts_us for figure in self.figures):
            yield self._parts()
        yield self._memory()

    def price_ms(self, figure: Figures) -> float:
        """Of a round, beyond colocated's: of the medians of the repeats."""
        return figure.median_ms - self._colocated(figure).median_ms

    def _colocated(self, figure: Figures) -> Figures:
        """Of the same batch."""
        batch = (figure.prompt_tokens, figure.batch)
        return next(one for one in self.figures if one.arm == COLOCATED and (one.prompt_tokens, one.batch) == batch)

    def _as_plain(self, figure: Figures) -> dict[str, Any]:
        return asdict(figure) | {
            "median": figure.median,
            "median_per_gpu": figure.median / figure.num_gpus,
            "median_ms_per_round": figure.median_ms,
            "price_ms_per_round": None if figure.acceptance_length is None else self.price_ms(figure),
        }

    def _speeds(self) -> Table:
        table = Table(
            "tokens in",
            "batch",
            "arm",
            "GPUs",
            "tokens/s",
            "a GPU",
            "of colocated",
            "ms a round",
            "price, ms",
            "bytes a round",
            "accepted + 1",
            caption="median (least–greatest); tokens/s with the prompts, a round without; price: beyond colocated's",
        )
        for figure in self.figures:
            length, num_bytes = figure.acceptance_length, figure.bytes_per_round
            table.add_row(
                f"{figure.prompt_tokens:,}",
                str(figure.batch),
                figure.arm,
                str(figure.num_gpus),
                _shown(figure.tokens_per_second, digits=0),
                f"{figure.median / figure.num_gpus:,.0f}",
                f"{figure.median / self._colocated(figure).median:.3f}",
                _shown(figure.ms_per_round, digits=2),
                "-" if length is None or figure.arm == COLOCATED else f"{self.price_ms(figure):+.2f}",
                "-" if num_bytes is None else f"{num_bytes:,.0f}",
                "-" if length is None else f"{length:.2f}",
            )
        return table

    def _parts(self) -> Table:
        timed = [figure for figure in self.figures if figure.parts_us]
        names = list(dict.fromkeys(name for figure in timed for name in figure.parts_us))
        table = Table(
            "tokens in",
            "batch",
            "arm",
            *names,
            caption="µs of a round on the target's stream: medians of the last repeat",
        )
        for figure in timed:
            parts = (f"{figure.parts_us.get(name, 0.0):,.1f}" for name in names)
            table.add_row(f"{figure.prompt_tokens:,}", str(figure.batch), figure.arm, *parts)
        return table

    def _memory(self) -> Table:
        of_target, of_draft = (f"{num_bytes / _GIB:.2f}" for num_bytes in self._logits)
        table = Table(
            "the target's process",
            "weights, GiB",
            "KV tokens",
            "in colocated's memory",
            "allocated, GiB",
            "attention",
            "reads the target's KV",
            caption=f"logits of the largest round, GiB: {of_target} at the target, {of_draft} at the draft",
        )
        for name, each in self._facts.items():
            gib = [f"{num_bytes / _GIB:.2f}" for num_bytes in (each.weight_bytes, each.allocated_bytes)]
            tokens = kv_tokens_in(self._facts[COLOCATED], each, self._workload.kv_cache_bytes)
            table.add_row(
                name,
                gib[0],
                f"{each.kv_tokens:,}",
                f"{tokens:,}",
                gib[1],
                ", ".join(each.attention_backends),
                each.kv_sharing or "-",
            )
        return table


def kv_tokens_in(whole: ArmFacts, each: ArmFacts, kv_cache_bytes: int) -> int:
    """KV tokens that `each` has room for if it takes as much memory for weights and KV as `whole` does."""
    return int(each.kv_tokens * (1 + (whole.weight_bytes - each.weight_bytes) / kv_cache_bytes))


def _shown(values: Sequence[float], *, digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
