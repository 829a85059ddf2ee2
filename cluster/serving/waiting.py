"""Deltas of one request that wait for whoever takes them: however many they are, they become one."""

from cluster.serving.engine import EngineDelta
from cluster.serving.join import JoinedChoices
from cluster.serving.types import PositionLogprobs


class WaitingDeltas:
    """Bounded by what the request may still generate. A delta that waits alone is taken as it came."""

    def __init__(self) -> None:
        self._last: EngineDelta | None = None
        self._joined: JoinedChoices | None = None
        self._prompt_logprobs: tuple[PositionLogprobs, ...] = ()

    def add(self, delta: EngineDelta) -> None:
        if self._last is not None:
            if self._joined is None:
                self._joined = JoinedChoices()
                self._joined.add(self._last.choices)
            self._joined.add(delta.choices)
        self._prompt_logprobs += delta.prompt_logprobs
        self._last = delta

    def take(self) -> EngineDelta | None:
        """What all of them say, and none waits any longer; None where none does."""
        last, joined, prompt_logprobs = self._last, self._joined, self._prompt_logprobs
        self._last, self._joined, self._prompt_logprobs = None, None, ()
        if last is None or joined is None:
            return last
        return EngineDelta(choices=joined.choices, cached_tokens=last.cached_tokens, prompt_logprobs=prompt_logprobs)
