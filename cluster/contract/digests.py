"""What a model folder says about its model and its tokens, as digests: equal ones mean the same, on any machine."""

import hashlib
import json
from pathlib import Path
from typing import Any

_OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")


def config_digest(folder: Path) -> str:
    """SHA-256 of config.json's content, however it is formatted."""
    return _digest(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def tokenizer_digest(folder: Path) -> str | None:
    """SHA-256 of what decides a token's id: vocabulary, merges and added tokens. None where there is no tokenizer.

    Templates, padding and the form of the file don't count: copies that were saved by other versions stay equal.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        model = tokenizer.get("model") or {}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
        added = sorted((token["id"], token["content"]) for token in tokenizer.get("added_tokens") or ())
        return _digest([model.get("type"), model.get("vocab"), merges, added])
    for name in _OTHER_TOKENIZERS:
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return None


def _digest(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
