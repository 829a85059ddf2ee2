"""The deltas of a request, put together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.serving.types import ChoiceDelta, PositionLogprobs, Response, RoundFigures


def join_responses(responses: Iterable[Response]) -> Response:
    """One response that says what all of them say, in their order; at least one."""
    responses = list(responses)
    joined = JoinedChoices()
    for response in responses:
        joined.add(response.choices)
    return Response(
        request_id=responses[0].request_id,
        choices=joined.choices,
        usage=responses[-1].usage,
        seed=responses[0].seed,
        prompt_logprobs=tuple(each for response in responses for each in response.prompt_logprobs),
    )


class JoinedChoices:
    """Deltas of some choices, put together as they come."""

    def __init__(self) -> None:
        self._choices: dict[int, _Joined] = {}

    def add(self, deltas: Iterable[ChoiceDelta]) -> None:
        for delta in deltas:
            self._choices.setdefault(delta.index, _Joined()).add(delta)

    @property
    def choices(self) -> tuple[ChoiceDelta, ...]:
        """One delta of each, by index."""
        return tuple(self._choices[index].delta(index) for index in sorted(self._choices))


@dataclass(slots=True)
class _Joined:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    speculation: RoundFigures | None = None
    last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.speculation is not None:
            self.speculation = _sum(self.speculation, delta.speculation)
        self.last = delta

    def delta(self, index: int) -> ChoiceDelta:
        assert self.last is not None
        return ChoiceDelta(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.last.finish_reason,
            matched_stop=self.last.matched_stop,
            speculation=self.speculation,
        )


def _sum(first: RoundFigures | None, second: RoundFigures) -> RoundFigures:
    if first is None:
        return second
    return RoundFigures(
        acceptance=first.acceptance + second.acceptance,
        rounds_without_draft=first.rounds_without_draft + second.rounds_without_draft,
    )
