"""A few tensors out of a checkpoint, without reading the rest of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from cluster.errors import UserError

DUMMY: Final = "dummy"
"""vLLM's `load_format` for random weights: there is no checkpoint, only a config."""

_DUMMY_SPREAD: Final = 1e-3
"""As vLLM's own dummies: so small that nothing overflows."""


def read_tensors(folder: Path, rename: Callable[[str], str | None]) -> dict[str, Any]:
    """The tensors of a safetensors checkpoint that `rename` gives a name (None leaves one out), on the CPU.

    Only headers are read of the others: a target's checkpoint may have hundreds of gigabytes, of which a draft shares
    two matrices.
    """
    return {
        name: checkpoint.get_tensor(stored)
        for checkpoint, stored in _stored(folder)
        if (name := rename(stored)) is not None
    }


def borrowed_parts(draft: Path) -> set[str]:
    """Of "embed_tokens" and "lm_head", what a draft's checkpoint hasn't got, and its target lends it.

    vLLM's loaders decide it by the names of the stored tensors too.
    """
    names = [stored for _, stored in _stored(draft)]
    return {part for part in ("embed_tokens", "lm_head") if not any(part in name for name in names)}


def _stored(folder: Path) -> Iterator[tuple[Any, str]]:
    """Every tensor's name, beside the open file that has it."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model {folder}", "it has no *.safetensors file", "convert its weights to safetensors")
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for stored in checkpoint.keys():  # noqa: SIM118  (not a dict: it can't be iterated)
                yield checkpoint, stored


def load_parameters(module: Any, tensors: dict[str, Any], *, checkpoint: Path) -> None:
    """Fill all of a vLLM module's parameters, each through its own loader.

    Raises:
        UserError: the checkpoint lacks one, or has one that the module doesn't know.
    """
    parameters = dict(module.named_parameters())
    if parameters.keys() != tensors.keys():
        wrong = sorted(parameters.keys() ^ tensors.keys())
        raise UserError(
            f"checkpoint {checkpoint}",
            f"it should have {', '.join(sorted(parameters))} and has {', '.join(sorted(tensors)) or 'none of them'}"
            f" (differing: {', '.join(wrong)})",
            "use a checkpoint in the layout that vLLM loads",
        )
    for name, parameter in parameters.items():
        loader = getattr(parameter, "weight_loader", None)
        if loader is None:
            parameter.data.copy_(tensors[name])
        else:
            loader(parameter, tensors[name])


def fill_with_dummies(module: Any) -> None:
    """Random weights, for measurements of time and memory alone."""
    for parameter in module.parameters():
        parameter.data.uniform_(-_DUMMY_SPREAD, _DUMMY_SPREAD)
