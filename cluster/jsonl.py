"""JSON lines in files."""

from pathlib import Path

from cluster.errors import UserError


def numbered_lines(file: Path, what: str) -> list[tuple[int, str]]:
    """Those that aren't blank, numbered from 1. Only a newline ends one: a JSON string may hold what Unicode calls line
    separators.

    Raises UserError, in which the file is called `what`, where it can't be read.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {file}", f"it can't be read ({error})", "check its path and encoding") from error
    lines = text.replace("\r\n", "\n").split("\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
