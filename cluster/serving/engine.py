"""What the service needs of an engine. `cluster.engine.async_engine` adapts vLLM's AsyncLLM to it."""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster.serving.model import ServedModel
from cluster.serving.types import ChoiceDelta, PositionLogprobs, Request


class EngineDeadError(Exception):
    """The engine has died and won't come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDelta:
    """What some choices gained in a step or more. `prompt_logprobs` comes with a request's first delta."""

    choices: tuple[ChoiceDelta, ...]
    cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class GenerationEngine(Protocol):
    """One target, with or without a draft."""

    @property
    def model(self) -> ServedModel:
        """What is served; it never changes."""

    @property
    def dead(self) -> bool:
        """Whether the engine has died."""

    @property
    def kv_cache_usage(self) -> float:
        """The share of the KV cache in use at the last step, 0 to 1."""

    async def prepare(self, request: Request) -> tuple[int, ...]:
        """The prompt's tokens, truncated as the request asks. Raises RequestError for what a tokenizer refuses."""

    def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        """Deltas until every choice has ended. Closing the generator ends the request and frees its KV cache.

        Raises:
            EngineDeadError: the engine has died.
            RequestError: the engine refuses this request, or has failed it and lives on.
        """

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their generators yield a last delta with `FinishReason.ABORTED`. Unknown ids are no error."""

    async def close(self) -> None:
        """Free everything. A second call does nothing."""
