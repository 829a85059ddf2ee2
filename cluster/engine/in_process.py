"""A vLLM engine in this process: the plain target, or target and draft together (placement `colocated`).

Colocated is the arm that every other placement is compared with.
"""

import itertools
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

from cluster.engine.cpu import profile
from cluster.engine.settings import EngineSettings
from cluster.engine.version import require_supported_vllm
from cluster.engine.vllm_errors import refused_settings
from cluster.speculation.figures import AcceptanceFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt. Temperature 0 is greedy; `seed` None draws from the engine's own stream."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """What one step added to request `index`. `finish_reason` and what follows it are set on its last delta.

    `accepted_by_round`: for each round, how many of its drafts were accepted.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    acceptance: AcceptanceFigures | None = None
    accepted_by_round: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All deltas of one request together."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_cached_tokens: int
    acceptance: AcceptanceFigures | None
    accepted_by_round: tuple[int, ...]


class InProcessEngine:
    """Starts on construction (imports vLLM, loads weights, allocates the KV cache); `close` frees it.

    `more_engine_args` are vLLM's own, for parts of this project inside the engine. Raises UserError for what vLLM
    refuses in the settings.
    """

    def __init__(self, settings: EngineSettings, *, more_engine_args: Mapping[str, Any] | None = None) -> None:
        require_supported_vllm()
        profile.activate()
        # Without it vLLM starts a process of its own for the engine's core, whose imports cost another 10 s.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine

        self._ids = itertools.count()
        arguments = settings.to_engine_args() | dict(more_engine_args or {})
        with refused_settings():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine; a second call does nothing."""
        self._engine.engine_core.shutdown()

    @property
    def vllm_engine(self) -> Any:
        """vLLM's own engine, for benchmarks and tests that look inside."""
        return self._engine

    def stream(self, requests: Sequence[GenerationRequest]) -> Generator[GenerationDelta, None, None]:
        """Run the requests together and yield what is made, until all have ended.

        Closing the iterator early aborts what is left.
        """
        with closing(self.steps(requests)) as steps:
            for deltas in steps:
                yield from deltas

    def steps(self, requests: Sequence[GenerationRequest]) -> Generator[list[GenerationDelta], None, None]:
        """As `stream`, step by step."""
        index_of = {self._add(request): index for index, request in enumerate(requests)}
        try:
            while index_of:
                outputs = self._engine.step()
                yield [_delta(index_of[output.request_id], output) for output in outputs]
                for output in outputs:
                    if output.finished:
                        del index_of[output.request_id]
        finally:
            if index_of:
                self._engine.abort_request(list(index_of))

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Run the requests together to their ends; completions in the requests' order."""
        deltas: list[list[GenerationDelta]] = [[] for _ in requests]
        for delta in self.stream(requests):
            deltas[delta.index].append(delta)
        return [join_deltas(parts) for parts in deltas]

    def _add(self, request: GenerationRequest) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        request_id = f"request-{next(self._ids)}"
        parameters = SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop=list(request.stop),
            ignore_eos=request.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(request.prompt_token_ids)), parameters)
        return request_id


def join_deltas(deltas: Sequence[GenerationDelta]) -> Completion:
    """The completion that the deltas of one ended request, in their order, make up."""
    last = deltas[-1]
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        num_cached_tokens=last.num_cached_tokens,
        acceptance=last.acceptance,
        accepted_by_round=last.accepted_by_round,
    )


def _delta(index: int, output: Any) -> GenerationDelta:
    completion = output.outputs[0]
    rounds = completion.spec_decode_metrics if output.finished else None
    return GenerationDelta(
        index=index,
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finish_reason=completion.finish_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
        acceptance=_figures(rounds) if rounds is not None else None,
        accepted_by_round=tuple(rounds.per_step_accepted) if rounds is not None else (),
    )


def _figures(rounds: Any) -> AcceptanceFigures:
    # The histogram counts rounds by accepted drafts; draft i was accepted in every round with more than i.
    histogram = list(rounds.histogram)
    return AcceptanceFigures(
        rounds=sum(histogram),
        drafted=rounds.num_draft_tokens,
        accepted_by_position=tuple(sum(histogram[position + 1 :]) for position in range(rounds.num_spec_tokens)),
    )
