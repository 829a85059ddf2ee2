"""The same pair twice, draft in the target's process and in one of its own, and a record of every round."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.contract.contract import KVContract
from cluster.engine.in_process import Completion, GenerationRequest, InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from tests.checkpoints import make_pair

# Small, so that a few short requests meet every case: chunks of 128 tokens at most, blocks of 32, 18 of them to use.
SIZES = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks": 19}
# A hybrid target's groups share its pool, and a colocated draft's is one more: (colocated, separate), so that they are
# full at the same moment.
HYBRID_BLOCKS = {"gemma4-dspark-agreeing": (61, 35), "gemma4-mtp-agreeing": (35, 35)}
BLOCK_SIZE = 32  # the smallest of vLLM's CPU attention
# (from, to, K): how many tokens are drafted with so many requests. So K = 0 occurs where there are many.
TOKENS_BY_REQUESTS = [(1, 7, 4), (8, 12, 2), (13, 16, 0)]
REJOIN_DEADLINE_S = 200
"""For a process to start, import vLLM and load, on a machine that does other things."""


class SplitSettings(EngineSettings):
    """As its base, with smaller blocks and fewer drafts the more requests there are."""

    def to_engine_args(self) -> dict[str, Any]:
        arguments = super().to_engine_args() | {"block_size": BLOCK_SIZE}
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = TOKENS_BY_REQUESTS
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A request in one round. In a chunk of a prompt that isn't its last, nothing is sampled."""

    request: int
    """Numbered as they first appear."""
    num_sampled: int
    num_rejected: int
    drafts: tuple[int, ...]


Round = tuple[Row, ...]


@dataclass(slots=True)
class Arm:
    engine: InProcessEngine
    rounds: list[Round] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        speculator = speculator_of(self.engine)
        propose = speculator.propose

        def recording(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            drafts = propose(batch, *arguments, **keywords)
            if not keywords.get("dummy_run"):
                sampled, rejected = arguments[4].tolist(), arguments[5].tolist()
                numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in batch.req_ids]
                wanted = drafts[:, : keywords["num_speculative_tokens"]]
                rows = zip(numbers, sampled, rejected, wanted.tolist(), strict=True)
                self.rounds.append(
                    tuple(Row(request=n, num_sampled=s, num_rejected=r, drafts=tuple(d)) for n, s, r, d in rows)
                )
            return drafts

        speculator.propose = recording

    def forget(self) -> None:
        """Begin a new record."""
        self.rounds.clear()
        self._numbers.clear()

    @property
    def contract(self) -> KVContract:
        """Of the arm with a draft elsewhere."""
        return separate_of(self).contract

    def run(self, requests: Sequence[GenerationRequest]) -> tuple[list[Completion], list[Round]]:
        """What came out of these requests, and their rounds."""
        self.forget()
        return self.engine.generate(requests), list(self.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    name: str
    colocated: Arm
    separate: Arm

    def compare(self, requests: Sequence[GenerationRequest]) -> tuple[list[Completion], list[Round]]:
        """Run the requests in both arms; everything must be the same, round by round."""
        expected, expected_rounds = self.colocated.run(requests)
        completions, rounds = self.separate.run(requests)
        assert rounds == expected_rounds
        assert completions == expected
        assert remote(self.separate).lost is None
        return completions, rounds


def speculator_of(engine: InProcessEngine) -> Any:
    return engine.vllm_engine.model_executor.driver_worker.worker.model_runner.speculator


def remote(arm: Arm) -> Any:
    """The arm's RemoteSpeculator."""
    return speculator_of(arm.engine)


def pair_settings(name: str, folder: Path, **sizes: Any) -> EngineSettings:
    pair = make_pair(name, folder)
    target = open_model(str(pair.target), role="target")
    speculation = plan_speculation(target, open_model(str(pair.draft), role="draft"), pair.num_speculative_tokens)
    return SplitSettings(target=target, speculation=speculation, **(SIZES | sizes))


def greedy(prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=tuple(prompt), max_tokens=max_tokens, ignore_eos=True)


def await_draft(arm: Arm) -> None:
    """Until the draft that was lost, or another, can answer."""
    deadline = time.monotonic() + REJOIN_DEADLINE_S
    while remote(arm).draft_epoch == 0:
        assert time.monotonic() < deadline, "the draft never came back"
        time.sleep(0.05)


def separate_of(arm: Arm) -> SeparateEngine:
    assert isinstance(arm.engine, SeparateEngine)
    return arm.engine
