"""Files that a command writes for its user: whole or not at all, and by one process at a time."""

import fcntl
import os
from pathlib import Path
from typing import IO, Any

from cluster.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Put `text` in the place of the file's, on the disk after it. Raises OSError; then the old file is still there."""
    written = path.with_name(f"{path.name}.new")
    with written.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hold(file: IO[Any], output: Path) -> None:
    """Keep other processes away from an output until `file`, of it, is closed.

    Raises:
        UserError: another process is writing it.
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "another process is writing it"
        raise UserError(f"output {output}", why, "wait for its end, or choose another --output") from error


def unwritable(output: Path, error: OSError) -> UserError:
    """What its user can do about it."""
    why = f"it can't be written ({error.strerror})"
    return UserError(f"output {output}", why, "mend that, and repeat the command")
