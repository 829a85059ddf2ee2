"""A model on disk: its folder and config, found from a path or a hub name, readable before any weight is loaded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A Hugging Face model folder. `name` is what the user typed; `config` is config.json as it stands."""

    name: str
    path: Path
    config: dict[str, Any] = field(repr=False)

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config: models with other inputs nest it."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.config.get("architectures") or ())

    def integer(self, key: str) -> int | None:
        """A whole number of the text config, or of the one round it; None where neither says."""
        value = self.text_config.get(key, self.config.get(key))
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def open_model(name: str, *, role: str, weights: bool = True) -> ModelFolder:
    """Find `name`, a folder or a hub name, and read its config. `role` is "target" or "draft", for messages.

    Without `weights` they may be absent, and aren't downloaded. Raises UserError when the model is absent or can't be
    read.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{role} {name}", "it is a file", "name the model's folder (the one with config.json)")
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise UserError(
                f"{role} {name}", "there is no such folder", "check the path, or give a hub name (OWNER/MODEL)"
            )
        path = _from_hub(name, role=role, weights=weights)
    config = _read_config(name, path, role=role)
    if weights:
        _check_weights(name, path, role=role)
    return ModelFolder(name=name, path=path, config=config)


def _from_hub(name: str, *, role: str, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    remedy = "check the name, the network and your access (hf auth login), or give a folder"
    try:
        patterns = ["*.json", "*.jinja", "*.model", "*.txt"] + ["*.safetensors"] * weights
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise UserError(f"{role} {name}", "the hub doesn't show it to you", remedy) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{role} {name}", "the hub has no such model", remedy) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(f"{role} {name}", "it is not on this machine and the hub can't be reached", remedy) from error
    except OSError as error:
        raise UserError(f"{role} {name}", f"its download failed ({type(error).__name__})", remedy) from error


def _read_config(name: str, path: Path, *, role: str) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{role} {name}", "the folder has no config.json", "give a model folder in Hugging Face's layout"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{role} {name}", f"its config.json can't be read ({error})", "download the model again"
        ) from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise UserError(
            f"{role} {name}", "its config.json names no architecture", "give a model folder in Hugging Face's layout"
        )
    return config


def _check_weights(name: str, path: Path, *, role: str) -> None:
    """Read the headers of the weights, so that a broken download is refused before an engine starts."""
    from safetensors import SafetensorError, safe_open

    files = set(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files |= {path / shard for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{role} {name}", f"its {index.name} can't be read", "download the model again") from error
    if not files:
        raise UserError(f"{role} {name}", "the folder has no *.safetensors", "give a model saved as safetensors")
    for file in sorted(files):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{role} {name}", f"{file.name} can't be read ({error})", "download the model again"
            ) from error
