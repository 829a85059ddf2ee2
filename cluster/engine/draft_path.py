"""A way round vLLM's reading of a draft's path.

vLLM 0.32 takes "dspark", "dflash", "eagle3" or "eagle-" anywhere in a draft's path for the method, even against a
method that is given (`vllm/config/speculative.py`, where it detects the method). So a standalone draft in
`~/.cache/dspark-cluster` would be started as a DSpark draft.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

_TAKEN_FOR_A_METHOD = ("eagle-", "eagle3", "dflash", "dspark")


def neutral_draft_path(path: Path) -> Path:
    """The same folder by a path that names no method: a symbolic link which lives as long as this process."""
    if not any(word in str(path).lower() for word in _TAKEN_FOR_A_METHOD):
        return path
    directory = Path(tempfile.mkdtemp(prefix="draft-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    link = directory / "model"
    link.symlink_to(path.resolve())
    return link
