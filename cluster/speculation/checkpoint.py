"""A few tensors out of a checkpoint, without reading the rest of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.errors import UserError


def read_tensors(folder: Path, rename: Callable[[str], str | None]) -> dict[str, Any]:
    """The tensors of a safetensors checkpoint that `rename` gives a name (None leaves one out), on the CPU.

    Only headers are read of the others: a target's checkpoint may have hundreds of gigabytes, of which a draft shares
    two matrices.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model {folder}", "it has no *.safetensors file", "convert its weights to safetensors")
    tensors: dict[str, Any] = {}
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for stored in checkpoint.keys():  # noqa: SIM118  (not a dict: it can't be iterated)
                name = rename(stored)
                if name is not None:
                    tensors[name] = checkpoint.get_tensor(stored)
    return tensors


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
