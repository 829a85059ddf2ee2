"""Inputs of batches, and a client that does what a test tells it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.batch.lines import BatchInput, read_input
from cluster.client import ChoiceDelta, FinishReason, GenerationError, Request, Response
from cluster.serving.types import RoundFigures, TextPrompt, Usage
from cluster.speculation.figures import AcceptanceFigures

WriteInput = Callable[..., BatchInput]


@pytest.fixture
def write_input(tmp_path: Path) -> WriteInput:
    """Write lines into a file, dicts as JSON, and read it as a batch."""

    def write(*lines: Any, defaults: dict[str, Any] | None = None) -> BatchInput:
        file = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("".join(f"{text}\n" for text in texts))
        return read_input(file, defaults or {})

    return write


def failure(status: str, retry_after_s: float | None = None) -> GenerationError:
    return GenerationError(grpc.StatusCode[status], "scripted", "", retry_after_s)


def answer(text: str) -> Response:
    acceptance = AcceptanceFigures(rounds=2, drafted=8, accepted_by_position=(2, 1, 0, 0))
    choice = ChoiceDelta(
        index=0,
        text=text.upper(),
        token_ids=(1, 2, 3),
        finish_reason=FinishReason.LENGTH,
        speculation=RoundFigures(acceptance=acceptance, rounds_without_draft=1),
    )
    return Response(
        request_id="any", choices=(choice,), usage=Usage(prompt_tokens=4, cached_tokens=0, completion_tokens=3)
    )


class ScriptedClient:
    """Answers with the prompt in capitals. Before that, the failures that `failures` has for the prompt, in order."""

    def __init__(self, failures: dict[str, list[GenerationError | Response]] | None = None) -> None:
        self.failures = failures or {}
        self.asked: list[str] = []
        self.running = 0
        self.most_running = 0

    async def generate(self, request: Request, *, timeout_s: float | None = None) -> Response:
        del timeout_s
        assert isinstance(request.prompt, TextPrompt)
        text = request.prompt.text
        self.asked.append(text)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if self.failures.get(text):
                scripted = self.failures[text].pop(0)
                if isinstance(scripted, GenerationError):
                    raise scripted
                return scripted
            return answer(text)
        finally:
            self.running -= 1


class ScriptedTime:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)
