"""A pair whose next token depends on the last one alone, over a small alphabet: for tests of distributions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import qwen3
from tests.checkpoints.shapes import HIDDEN
from tests.checkpoints.vocabulary import VOCAB_SIZE, printable_ids

ALPHABET = printable_ids()[:8]

_LIKELIEST = 0.7
_NEVER = -40.0  # logit of all other tokens
_MARKOV_GAIN = 1000.0  # the draft's own logits don't count beside it


def next_token_probabilities() -> torch.Tensor:
    """float64[A, A]: of alphabet token j after alphabet token i. One is likely, the others are of unequal chances."""
    size = len(ALPHABET)
    unequal = torch.arange(3, size + 3, dtype=torch.float64).repeat(size, 1)
    likeliest = torch.eye(size, dtype=torch.float64).roll(1, dims=1)
    return _LIKELIEST * likeliest + (1 - _LIKELIEST) * unequal / unequal.sum(dim=1, keepdim=True)


def write_pair(folder: Path, seed: int) -> tuple[Path, Path]:
    """A Qwen3 target and a DSpark draft whose Markov head drafts the likeliest tokens."""
    target, draft = folder / "target", folder / "draft"
    qwen3.write_target(target, seed, None)
    with _changing(target) as tensors:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()  # a layer then adds nothing to the token's embedding
        codes, head = _codes(), _logits()
        tensors["model.embed_tokens.weight"] = HIDDEN**0.5 * codes
        tensors["lm_head.weight"] = head / (HIDDEN**0.5 * tensors["model.norm.weight"])
    qwen3.write_dspark_draft(draft, seed + 1, None)
    with _changing(draft) as tensors:
        tensors["markov_head.markov_w1.weight"] = codes
        tensors["markov_head.markov_w2.weight"] = _MARKOV_GAIN * head
    return target, draft


def _codes() -> torch.Tensor:
    """float32[V, H]: a dimension of its own for each token of the alphabet."""
    codes = torch.zeros(VOCAB_SIZE, HIDDEN)
    codes[ALPHABET, range(len(ALPHABET))] = 1.0
    return codes


def _logits() -> torch.Tensor:
    """float32[V, H]: the logit of every token after each of the alphabet's, in the latter's dimension."""
    logits = torch.full((VOCAB_SIZE, HIDDEN), _NEVER)
    logits[ALPHABET, : len(ALPHABET)] = next_token_probabilities().T.log().float()
    return logits


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, metadata={"format": "pt"})
