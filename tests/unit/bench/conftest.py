"""Servers of a scripted engine: one that says "a", and one that drafts and answers word problems."""

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

import pytest

from cluster.serving.engine import EngineDelta
from cluster.serving.model import ServedDraft
from cluster.serving.server import GenerationServer
from cluster.serving.settings import ServerSettings
from cluster.serving.types import ChoiceDelta, FinishReason, Request, RoundFigures
from cluster.speculation.figures import AcceptanceFigures
from tests.serving.loop import LoopThread
from tests.serving.scripted_engine import MODEL, ScriptedEngine
from tests.unit.serving.conftest import loop, start

__all__ = ["Answering", "loop", "start"]


class Answering(ScriptedEngine):
    """Answers each prompt with the next of `texts` in two messages of two tokens. Of a draft of 2 it accepts one, and
    drafts nothing for a request that forbids it."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.model = replace(
            MODEL, max_model_len=4096, draft=ServedDraft(model="d", method="dspark", num_speculative_tokens=2)
        )
        self.texts = texts
        self.asked: list[Request] = []

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        del request_id, prompt_token_ids, max_tokens
        self.asked.append(request)
        text = self.texts[(len(self.asked) - 1) % len(self.texts)]
        figures = RoundFigures(
            acceptance=AcceptanceFigures(rounds=1, drafted=2, accepted_by_position=(1, 0)), rounds_without_draft=0
        )
        drafted = request.speculation.enabled is not False
        for said, last in ((text[:1], None), (text[1:], FinishReason.END_OF_SEQUENCE)):
            choice = ChoiceDelta(index=0, text=said, token_ids=(7, 8), finish_reason=last)
            yield EngineDelta(choices=(replace(choice, speculation=figures if drafted else None),), cached_tokens=0)


@pytest.fixture
def answering(loop: LoopThread) -> Iterator[Callable[[list[str]], tuple[str, Answering]]]:
    """Start a server that answers so; its address and engine."""
    servers: list[GenerationServer] = []

    def one(texts: list[str]) -> tuple[str, Answering]:
        engine = Answering(texts)

        async def started() -> GenerationServer:
            server = GenerationServer(engine, ServerSettings(port=0, drain_grace_s=0.0))
            await server.start()
            return server

        servers.append(loop.run(started()))
        return servers[-1].address, engine

    yield one
    for server in servers:
        loop.run(server.stop())
