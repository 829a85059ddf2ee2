"""A pair whose next token depends on the last one alone, over a small alphabet: for tests of distributions."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import qwen3
from tests.checkpoints.vocabulary import printable_ids

ALPHABET = printable_ids()[:12]

# What all other tokens' logits are below the alphabet's: their probability, of less than e^-30, is none.
_NEVER = -40.0


def write_pair(folder: Path, seed: int) -> tuple[Path, Path]:
    """A Qwen3 target and a standalone draft, the same model twice: the draft is the target's likeliest token."""
    target, draft = folder / "target", folder / "draft"
    qwen3.write_standalone_draft(target, seed, None)
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # a layer then adds nothing to the token's embedding
    # The last dimension is the same for all tokens, and tells the alphabet from the rest.
    tensors["model.embed_tokens.weight"][:, -1] = 1.0
    head = tensors["lm_head.weight"]
    head[:, -1] = _NEVER
    head[ALPHABET, -1] = 0.0
    save_file(tensors, file, metadata={"format": "pt"})
    shutil.copytree(target, draft)
    return target, draft


def next_token_probabilities(target: Path) -> torch.Tensor:
    """float64[A, A]: of alphabet token j after alphabet token i, from the weights alone."""
    tensors = {name: tensor.double() for name, tensor in load_file(target / "model.safetensors").items()}
    states = tensors["model.embed_tokens.weight"][ALPHABET]
    states = states * (states.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * tensors["model.norm.weight"]
    return (states @ tensors["lm_head.weight"].T).softmax(dim=1)[:, ALPHABET]
