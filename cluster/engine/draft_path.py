"""A way round vLLM's reading of a draft's path.

vLLM 0.32 takes "dspark", "dflash", "eagle3" or "eagle-" anywhere in a draft's path for the method, even against a
method that is given (`vllm/config/speculative.py`, where it detects the method). So a standalone draft in
`~/.cache/dspark-cluster` would be started as a DSpark draft.
"""

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from cluster.errors import UserError

_TAKEN_FOR_A_METHOD = ("eagle-", "eagle3", "dflash", "dspark")


def neutral_draft_path(path: Path) -> Path:
    """The same folder by a path that names no method: a symbolic link. It stays, for the processes that come after:
    one that is killed could not take its own away.

    Raises:
        UserError: the folder of such links is another user's, who could put other weights there.
    """
    if not any(word in str(path).lower() for word in _TAKEN_FOR_A_METHOD):
        return path
    real = path.resolve()
    links = Path(tempfile.gettempdir()) / f"draft-models-{os.getuid()}"
    links.mkdir(mode=0o700, exist_ok=True)
    found = links.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(str(links), "it is no folder of this user's", "remove it, or name another by TMPDIR")
    link = links / hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    with suppress(FileExistsError):
        link.symlink_to(real)
    return link
