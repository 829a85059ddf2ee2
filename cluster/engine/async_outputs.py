"""From AsyncLLM's outputs to the service's deltas, for one request."""

from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from cluster.serving.engine import EngineDelta
from cluster.serving.errors import RequestError, invalid
from cluster.serving.types import ChoiceDelta, FinishReason, PositionLogprobs, Request, RoundFigures, TokenLogprob
from cluster.speculation.figures import AcceptanceFigures


class DeltaReader:
    """Reads one request's outputs in their order; it remembers what each choice's figures were."""

    def __init__(self, request_id: str, request: Request, output_processor: Any) -> None:
        self._request_id = request_id
        self._request = request
        self._processor = output_processor
        self._choices: dict[int, _Choice] = {}

    def read(self, output: Any) -> EngineDelta:
        """Raises RequestError where the engine gave the request up."""
        running = self._running_rounds()
        return EngineDelta(
            choices=tuple(self._choice(part, running.get(part.index)) for part in output.outputs),
            cached_tokens=output.num_cached_tokens or 0,
            prompt_logprobs=_positions(output.prompt_logprobs or (), self._request.output.prompt_logprobs),
        )

    def _running_rounds(self) -> Mapping[int, Any]:
        """vLLM's counts for the choices that still run; an ended one's come with its last output."""
        states = self._processor.request_states
        internal_ids = self._processor.external_req_ids.get(self._request_id, ())
        return {states[each].request_index: states[each].spec_decode_metrics for each in internal_ids}

    def _choice(self, part: Any, running: Any) -> ChoiceDelta:
        if part.finish_reason == "error":
            raise self._failed()
        choice = self._choices.setdefault(part.index, _Choice())
        choice.tokens += len(part.token_ids)
        finish_reason, matched = _finish(part.finish_reason, part.stop_reason)
        return ChoiceDelta(
            index=part.index,
            text=part.text,
            token_ids=tuple(part.token_ids),
            logprobs=_positions(part.logprobs or (), self._request.output.logprobs),
            finish_reason=finish_reason,
            matched_stop=matched,
            speculation=choice.since(part.spec_decode_metrics or running),
        )

    def _failed(self) -> RequestError:
        constraint = self._request.structured_output
        if constraint is not None:
            # A schema that refers to itself alone, say: every token is masked, and what is drawn then is refused.
            return invalid(
                f"structured_output.{constraint.kind}", "no output satisfies it, with what else is asked for"
            )
        return RequestError(grpc.StatusCode.INTERNAL, "", "the engine gave this request up")


class _Choice:
    """One choice so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self._histogram: list[int] = []
        self._drafted = 0
        self._without_draft = 0

    def since(self, rounds: Any) -> RoundFigures | None:
        """What `rounds`, vLLM's counts so far, have more than at the last call."""
        if rounds is None:
            return None
        histogram, before = list(rounds.histogram), self._histogram or [0] * len(rounds.histogram)
        new = [now - then for now, then in zip(histogram, before, strict=True)]
        # Of the tokens so far, the prompt's step made one, each later step one and what it accepted. A last round's
        # tokens may be cut by a stop, so the difference can fall.
        accepted = sum(position * count for position, count in enumerate(histogram))
        without_draft = max(self._without_draft, self.tokens - 1 - accepted - sum(histogram))
        figures = RoundFigures(
            acceptance=AcceptanceFigures(
                rounds=sum(new),
                drafted=rounds.num_draft_tokens - self._drafted,
                # Draft i was accepted in every round that accepted more than i.
                accepted_by_position=tuple(sum(new[position + 1 :]) for position in range(rounds.num_spec_tokens)),
            ),
            rounds_without_draft=without_draft - self._without_draft,
        )
        self._histogram, self._drafted, self._without_draft = histogram, rounds.num_draft_tokens, without_draft
        return figures


def _finish(reason: str | None, stop: str | int | None) -> tuple[FinishReason | None, str | int | None]:
    match reason:
        case None:
            return None, None
        case "length":
            return FinishReason.LENGTH, None
        case "abort":
            return FinishReason.ABORTED, None
    if stop is None:
        return FinishReason.END_OF_SEQUENCE, None
    return FinishReason.STOP_STRING if isinstance(stop, str) else FinishReason.STOP_TOKEN, stop


def _positions(positions: Iterable[Mapping[int, Any] | None], top: int | None) -> tuple[PositionLogprobs, ...]:
    """vLLM gives the position's own token first, then the most probable ones; a prompt's first position has none."""
    read = []
    for position in positions:
        if position:
            tokens = [_token(token_id, logprob) for token_id, logprob in position.items()]
            best = sorted((token for token in tokens if token.rank <= (top or 0)), key=lambda token: token.rank)
            read.append(PositionLogprobs(token=tokens[0], top=tuple(best)))
    return tuple(read)


def _token(token_id: int, logprob: Any) -> TokenLogprob:
    text = logprob.decoded_token or ""
    return TokenLogprob(token_id=token_id, text=text, logprob=logprob.logprob, rank=logprob.rank)
