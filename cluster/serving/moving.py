"""A request that goes on with another replica: what it has sent becomes a part of its prompt."""

from dataclasses import replace

from cluster.serving.engine import EngineDelta
from cluster.serving.types import Request


class Progress:
    """What a request has sent so far.

    It is moved where the rest comes out as it would have: greedy, or drawn by a seed, which vLLM's V2 sampler mixes
    with the position alone; without a seed the rest is another draw from the same distribution. What depends on the
    output apart from the prompt (penalties for what was generated, grammars), or on text that the detokenizer holds
    back, is not moved once it has begun.
    """

    def __init__(self, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int) -> None:
        self._request = request
        self._prompt = prompt_token_ids
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._text_is_complete = True
        self._cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Sent so far, of all choices."""
        return len(self._tokens)

    def add(self, delta: EngineDelta) -> EngineDelta:
        """The delta as the client gets it: what only a request's beginning says is said once."""
        is_first, self._cached_tokens = self._cached_tokens is None, self._cached_tokens or delta.cached_tokens
        for choice in delta.choices:
            self._tokens.extend(choice.token_ids)
            if choice.token_ids:
                self._text_is_complete = bool(choice.text) and not choice.text.endswith("\N{REPLACEMENT CHARACTER}")
        return delta if is_first else replace(delta, cached_tokens=self._cached_tokens, prompt_logprobs=())

    def why_not(self) -> str | None:
        """Why the request can't be moved, if it can't."""
        if not self._tokens:
            return None
        sampling, stopping = self._request.sampling, self._request.stopping
        reasons = {
            "it has several choices": (sampling.n or 1) > 1,
            "its output follows a grammar": self._request.structured_output is not None,
            "its penalties count what was generated": bool(sampling.presence_penalty or sampling.frequency_penalty),
            "its bad words are looked for in what was generated": bool(sampling.bad_words),
            "a stop string may have begun": bool(stopping.stop_strings),
            "its last token's text is incomplete": not self._text_is_complete,
        }
        return next((why for why, holds in reasons.items() if holds), None)

    def rest(self) -> tuple[Request, tuple[int, ...], int]:
        """The request for what is missing, its prompt and the most tokens that it may still have."""
        sent = len(self._tokens)
        stopping = self._request.stopping
        if stopping.min_tokens:
            stopping = replace(stopping, min_tokens=max(0, stopping.min_tokens - sent))
        output = replace(self._request.output, prompt_logprobs=None) if sent else self._request.output
        request = replace(self._request, stopping=stopping, output=output)
        return request, (*self._prompt, *self._tokens), self._max_tokens - sent
