"""A real draft for any target, without training: the target's own first layers.

Its acceptance grows with the layers that are kept, from almost nothing to certainty, which is what exactness tests
and a first demo need. It is too large to make anything faster.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

from cluster.errors import UserError
from cluster.models.folder import ModelFolder

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def truncated_draft(target: ModelFolder, layers: int, folder: Path) -> Path:
    """Make `folder` a model of the target's first `layers` layers, with its embedding, norm, head and tokenizer.

    A folder that is there already is taken as it is. Raises UserError unless the draft would be shorter than the
    target and not empty.
    """
    depth = target.integer("num_hidden_layers")
    if depth is None or not 1 <= layers < depth:
        raise UserError(f"{layers} layers", f"target {target.name} has {depth}", "choose fewer, and at least 1")
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.making-", dir=folder.parent) as temporary:
        unfinished = Path(temporary, "model")
        unfinished.mkdir()
        _write(target, layers, unfinished)
        if not (folder / "config.json").is_file():
            unfinished.rename(folder)
    return folder


def _write(target: ModelFolder, layers: int, folder: Path) -> None:
    # Here, not above: torch takes seconds to import, and a draft that is there needs none of it.
    from safetensors import safe_open
    from safetensors.torch import save

    for file in target.path.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.startswith("model."):
            shutil.copyfile(file, folder / file.name)
    config = target.config | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {}
    for shard in sorted(target.path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                layer = _LAYER.search(name)
                if layer is None or int(layer[1]) < layers:
                    weights[name] = tensors.get_tensor(name)
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
