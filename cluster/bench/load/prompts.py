"""What is asked: prompts out of a file, the bundled ones, or random tokens."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.bench.load.bundled import BUNDLED
from cluster.client import (
    ChatMessage,
    ChatPrompt,
    ModelInfo,
    Request,
    Sampling,
    Stopping,
    TextPrompt,
    TokenPrompt,
)
from cluster.errors import UserError
from cluster.serving.types import Prompt
from cluster.training.questions import read_questions

BUNDLED_NAME: Final = "bundled"
RANDOM_NAME: Final = "random"

_WARMUPS: Final = 4
"""Where nothing limits how many run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """`prompts` is empty for random tokens, which no model was trained on: acceptance on them says nothing."""

    name: str
    prompts: tuple[str, ...]

    @property
    def is_random(self) -> bool:
        return self.name == RANDOM_NAME

    @property
    def digest(self) -> str:
        """SHA-256 of the prompts."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is asked of each prompt. `input_tokens`: of a random prompt, or the most that a text keeps; `num_warmups`
    None: as many as run at once; `chat` None follows the model."""

    num_prompts: int
    num_warmups: int | None
    max_tokens: int
    input_tokens: int | None
    ignore_eos: bool
    temperature: float
    seed: int
    chat: bool | None


def read_dataset(name: str) -> Dataset:
    """`bundled`, `random`, or a JSONL file with `turns`, `question`, `prompt` or `problem` on each line.

    Of several turns the first is asked. Raises UserError for a file that can't be read.
    """
    if name == RANDOM_NAME:
        return Dataset(name=name, prompts=())
    if name == BUNDLED_NAME:
        return Dataset(name=name, prompts=BUNDLED)
    prompts = tuple(read_questions(Path(name)))
    if not prompts:
        raise UserError(f"dataset {name}", "there is no prompt in it", 'write one a line, such as {"prompt": "Hello"}')
    return Dataset(name=Path(name).name, prompts=prompts)


def make_requests(
    dataset: Dataset, shape: Shape, concurrency: int | None, info: ModelInfo, run: str
) -> tuple[list[Request], list[Request]]:
    """The requests of a run and its warm-ups: the same prompts, in the same order, for every `run` of a shape.

    A dataset with fewer prompts is gone through again. No request finds another's prefix in the cache, of this run or
    of one before it: `run` salts them.

    Raises:
        UserError: the model has no chat template and `chat` asks for one.
    """
    chat = info.has_chat_template if shape.chat is None else shape.chat
    if chat and not info.has_chat_template:
        raise UserError("--chat", f"{info.model} has no chat template", "leave it out")
    prompts = _prompts(dataset, shape, info, chat)
    num_warmups = (concurrency or _WARMUPS) if shape.num_warmups is None else shape.num_warmups
    wanted = shape.num_prompts + num_warmups
    requests = [_request(next(prompts), shape, index, f"{run}-{index}") for index in range(wanted)]
    return requests[: shape.num_prompts], requests[shape.num_prompts :]


def _prompts(dataset: Dataset, shape: Shape, info: ModelInfo, chat: bool) -> Iterator[Prompt]:
    source = random.Random(shape.seed)
    if dataset.is_random:
        while True:
            yield TokenPrompt(token_ids=tuple(source.choices(range(info.vocab_size), k=shape.input_tokens or 1)))
    order = source.sample(dataset.prompts, k=len(dataset.prompts))
    while True:
        for text in order:
            yield ChatPrompt(messages=(ChatMessage(role="user", content=text),)) if chat else TextPrompt(text=text)


def _request(prompt: Prompt, shape: Shape, index: int, salt: str) -> Request:
    return Request(
        prompt=prompt,
        sampling=Sampling(temperature=shape.temperature, seed=shape.seed + index if shape.temperature else None),
        stopping=Stopping(max_tokens=shape.max_tokens, ignore_eos=shape.ignore_eos),
        truncate_prompt_tokens=None if isinstance(prompt, TokenPrompt) else shape.input_tokens,
        cache_salt=salt,
    )
