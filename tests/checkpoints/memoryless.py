"""A pair whose next token depends on the last one alone, over a small alphabet: for tests of distributions."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import qwen3
from tests.checkpoints.shapes import HIDDEN
from tests.checkpoints.vocabulary import VOCAB_SIZE, printable_ids

ALPHABET = printable_ids()[:8]

_LIKELIEST = 0.7
_NEVER = -40.0  # logit of all other tokens


def next_token_probabilities() -> torch.Tensor:
    """float64[A, A]: of alphabet token j after alphabet token i. One is likely, the others are of unequal chances."""
    size = len(ALPHABET)
    unequal = torch.arange(1, size + 1, dtype=torch.float64).repeat(size, 1)
    likeliest = torch.eye(size, dtype=torch.float64).roll(1, dims=1)
    return _LIKELIEST * likeliest + (1 - _LIKELIEST) * unequal / unequal.sum(dim=1, keepdim=True)


def write_pair(folder: Path, seed: int) -> tuple[Path, Path]:
    """A Qwen3 target and a standalone draft, the same model twice: it drafts the likeliest tokens."""
    target, draft = folder / "target", folder / "draft"
    qwen3.write_standalone_draft(target, seed, None)
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # a layer then adds nothing to the token's embedding
    # A token's state is one dimension of its own, of which the head reads the logits.
    embedding, head = torch.zeros(VOCAB_SIZE, HIDDEN), torch.full((VOCAB_SIZE, HIDDEN), _NEVER)
    embedding[ALPHABET, range(len(ALPHABET))] = HIDDEN**0.5
    head[ALPHABET, : len(ALPHABET)] = next_token_probabilities().T.log().float()
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = head / (HIDDEN**0.5 * tensors["model.norm.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    shutil.copytree(target, draft)
    return target, draft
