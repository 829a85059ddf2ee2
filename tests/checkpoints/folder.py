"""Writing a checkpoint as a Hugging Face folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints.vocabulary import save_tokenizer

Config = dict[str, Any]


class Weights:
    """The named tensors of one checkpoint, drawn in order from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, or replace it."""
        self.tensors[name] = tensor.contiguous()

    def normal(self, name: str, *shape: int, std: float = 1.0) -> None:
        """Add a tensor of independent normal values."""
        self.put(name, std * torch.randn(shape, generator=self._generator))

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a matrix that maps an input of unit variance to an output of standard deviation `gain`."""
        self.normal(name, rows, columns, std=gain / columns**0.5)

    def norm(self, name: str, size: int, level: float = 1.0) -> None:
        """Add the weight of an RMSNorm: values around `level`, unequal, so that a norm left out shows."""
        self.put(name, level * (1 + 0.1 * torch.randn(size, generator=self._generator)))


def write_config(folder: Path, config: Config) -> None:
    """Write config.json and the tiny tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tokenizer(folder)


def write_checkpoint(folder: Path, config: Config, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write config.json, the tiny tokenizer and model.safetensors to `folder`."""
    write_config(folder, config)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
