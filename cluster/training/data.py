"""Training sequences: the target's answers to prompts, as token ids in a JSONL file, and batches of them.

A line is {"prompt": [...], "answer": [...]}; the file grows while answers are made, and a later run goes on from there.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# So many batches are cut from sequences in order of length, so that little of a batch is padding.
_BATCHES_SORTED_TOGETHER = 64
# Kernels with a mask want rows of such a length.
_PAD_TO_MULTIPLE = 8


class Dialogue(NamedTuple):
    """Token ids of a prompt, chat template included, and of its answer, which ends with the end token unless cut."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens [B, S], padded on the right with 0, and what an answer spans: `starts` [B] to `ends` [B], exclusive."""

    tokens: Tensor
    starts: Tensor
    ends: Tensor


def read_dialogues(file: Path) -> list[Dialogue]:
    """All whole lines of the file: a run that was stopped may have left half of one, which is cut off."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        file.write_text(whole, encoding="utf-8")
    lines = (json.loads(line) for line in whole.splitlines())
    return [Dialogue(tuple(line["prompt"]), tuple(line["answer"])) for line in lines]


def append_dialogues(file: Path, dialogues: Iterable[Dialogue]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(dialogue._asdict()) + "\n" for dialogue in dialogues)


class Batches:
    """Endless batches by step number: the same for the same sequences, sizes and seed, wherever training resumes.

    Dialogues without two answer tokens teach nothing and are left out; longer ones than `max_length` are cut.
    """

    def __init__(self, dialogues: Sequence[Dialogue], *, size: int, max_length: int, seed: int) -> None:
        self._sequences = [
            ((*prompt, *answer)[:max_length], len(prompt))
            for prompt, answer in dialogues
            if min(len(answer), max_length - len(prompt)) >= 2
        ]
        self._size, self._seed = min(size, len(self._sequences)), seed
        self._epoch, self._order = -1, list[list[int]]()

    def __len__(self) -> int:
        """Batches an epoch; what doesn't fill one waits for the next epoch's order."""
        return len(self._sequences) // self._size if self._sequences else 0

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(self._shuffled(epoch))
        return self._collate([self._sequences[chosen] for chosen in self._order[index]])

    def _shuffled(self, epoch: int) -> Iterator[list[int]]:
        generator = random.Random(f"{self._seed}/{epoch}")
        indices = list(range(len(self._sequences)))
        generator.shuffle(indices)
        span = self._size * _BATCHES_SORTED_TOGETHER
        batches = []
        for start in range(0, len(self) * self._size, span):
            together = sorted(
                indices[start : min(start + span, len(self) * self._size)], key=lambda i: len(self._sequences[i][0])
            )
            batches += [together[at : at + self._size] for at in range(0, len(together), self._size)]
        generator.shuffle(batches)
        yield from batches

    def _collate(self, rows: Sequence[tuple[tuple[int, ...], int]]) -> Batch:
        longest = max(len(tokens) for tokens, _ in rows)
        width = -(-longest // _PAD_TO_MULTIPLE) * _PAD_TO_MULTIPLE
        tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in rows])
        starts = torch.tensor([start for _, start in rows])
        return Batch(tokens=tokens, starts=starts, ends=torch.tensor([len(ids) for ids, _ in rows]))
