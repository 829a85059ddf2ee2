"""An engine that does what a test tells it, where the engine isn't the point: the service around it is real."""

import asyncio
from collections.abc import AsyncGenerator, Iterable

from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.model import ServedModel
from cluster.serving.types import ChoiceDelta, FinishReason, Request, Sampling, TextPrompt, TokenPrompt

MODEL = ServedModel(
    name="scripted",
    vocab_size=512,
    max_model_len=256,
    max_logprobs=20,
    has_chat_template=False,
    default_sampling=Sampling(n=1, temperature=0.0, top_p=0.9),
    default_max_tokens=None,
    schedules_by_priority=False,
    vllm_version="0.32.0",
)


class ScriptedEngine:
    """Says "a" for each token it makes, one in `step_s`. While held, requests make one token and then nothing."""

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self.model = MODEL
        self.dead = False
        self.kv_cache_usage = 0.25
        self.running: list[str] = []
        self.closed: list[str] = []
        self._held = False
        self._aborted: set[str] = set()

    def hold(self) -> None:
        self._held = True

    def go(self) -> None:
        self._held = False

    def die(self) -> None:
        self.dead = True

    async def prepare(self, request: Request) -> tuple[int, ...]:
        match request.prompt:
            case TokenPrompt(token_ids=token_ids):
                return token_ids
            case TextPrompt(text=text):
                return tuple(text.encode())
        raise NotImplementedError("no template")

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        del prompt_token_ids
        self._aborted.discard(request_id)
        self.running.append(request_id)
        choices = range(request.sampling.n or 1)
        try:
            for position in range(max_tokens):
                last = FinishReason.LENGTH if position == max_tokens - 1 else None
                yield EngineDelta(
                    choices=tuple(ChoiceDelta(index=i, text="a", token_ids=(9,), finish_reason=last) for i in choices),
                    cached_tokens=0,
                )
                await asyncio.sleep(self._step_s)
                while self._held and not self.dead and request_id not in self._aborted:
                    await asyncio.sleep(0.001)
                if self.dead:
                    raise EngineDeadError("scripted")
                if request_id in self._aborted:
                    ended = tuple(ChoiceDelta(index=i, finish_reason=FinishReason.ABORTED) for i in choices)
                    yield EngineDelta(choices=ended, cached_tokens=0)
                    return
        finally:
            self.running.remove(request_id)
            self.closed.append(request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._aborted |= set(request_ids)

    async def close(self) -> None:
        self.dead = True
