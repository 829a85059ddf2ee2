"""What the engines counted, out of their own pages of Prometheus figures."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

PARTS: Final = ("fuse", "encode", "transfer", "draft", "decode", "wait")
"""Of a round with a draft in another process, as the target's clock has them. `wait` is transfer and draft where a
GPU's stream waits, and nobody tells them apart."""

_STEPS: Final = "vllm:iteration_tokens_total_count"
_COUNTERS: Final = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}
_NAMES: Final = _COUNTERS | {
    "dspark_rounds_total": "rounds",
    "dspark_draft_lost": "draft_lost",
    "dspark_draft_losses_total": "draft_losses",
    "process_start_time_seconds": "process_started",
}
_NEVER_LOWER: Final = ("steps", "rounds", "draft_losses", *_COUNTERS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Of all replicas together, by name, since they started. `replicas` is how many answered."""

    replicas: int
    values: Mapping[str, float]

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """What came after `before`; a draft that was lost by then, and not back, is among its losses. Nothing where
        another number of replicas has answered: their sums can't be told apart."""
        if self.replicas != before.replicas:
            return EngineCounters(replicas=self.replicas, values={})
        gained = {name: value - before.values.get(name, 0.0) for name, value in self.values.items()}
        if "draft_losses" in gained:
            gained["draft_losses"] += before.values["draft_lost"]
        return EngineCounters(replicas=self.replicas, values=gained)


def read_counters(pages: Mapping[str, str | None]) -> EngineCounters:
    """Add up the pages of the replicas, by name; one that is None didn't answer."""
    values = defaultdict[str, float](float)
    answered = [page for page in pages.values() if page is not None]
    for page in answered:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if (name := _name(sample.name, sample.labels)) is not None:
                    values[name] += sample.value
    return EngineCounters(replicas=len(answered), values=dict(values))


def has_lost_replica(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> bool:
    """Whether a replica, by name, has no page before or after, or began again between the two."""
    for name, page in before.items():
        later = after[name]
        if page is None or later is None:
            return True
        if _began_again(read_counters({name: page}).values, read_counters({name: later}).values):
            return True
    return False


def kv_cache_tokens(pages: Mapping[str, str | None]) -> int:
    """That the targets' KV caches have room for, all together; 0 where no page says it."""
    tokens = 0
    for page in filter(None, pages.values()):
        for family in text_string_to_metric_families(page):
            if family.name == "vllm:cache_config_info":
                for sample in family.samples:
                    tokens += int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
    return tokens


def step_figures(counted: EngineCounters, duration_s: float) -> dict[str, float]:
    """An average engine step, in milliseconds and bytes by part, over `duration_s` of all replicas.

    `target` is what isn't any other part: the target's own step with scheduling and, where requests don't wait, its
    idle time. Parts that nobody timed are missing: of a device channel, where a GPU's stream waits, all but `fuse` and
    `wait`; elsewhere `wait` is transfer and draft.
    """
    steps = counted.values.get("steps", 0.0)
    if not steps:
        return {}
    whole_ms = 1e3 * duration_s * counted.replicas / steps
    parts = {part: 1e3 * counted.values.get(part, 0.0) / steps for part in PARTS}
    figures = {"engine_steps": steps, "step_ms": whole_ms, "step_target_ms": whole_ms - sum(parts.values())}
    if "rounds" in counted.values:
        figures |= {f"step_{part}_ms": value for part, value in parts.items() if value}
        if wait_ms := parts["transfer"] + parts["draft"] + parts["wait"]:
            figures["step_wait_ms"] = wait_ms
        figures |= {name: counted.values[name] / steps for name in ("bytes_to_draft", "bytes_to_target")}
        figures["draft_losses"] = counted.values["draft_losses"]
    return figures | {name: counted.values[name] for name in _COUNTERS.values() if name in counted.values}


def _began_again(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Whether one replica's process is another, or counts from 0 again."""
    if before.get("process_started") != after.get("process_started"):
        return True
    return any(after.get(name, 0.0) < before.get(name, 0.0) for name in _NEVER_LOWER)


def _name(sample: str, labels: Mapping[str, str]) -> str | None:
    if sample == _STEPS:
        return "steps"
    if sample == "dspark_round_seconds_total":
        return labels["part"]
    if sample == "dspark_channel_bytes_total":
        return f"bytes_{labels['direction']}"
    return _NAMES.get(sample)
