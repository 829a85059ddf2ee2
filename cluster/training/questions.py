"""Questions in JSONL files, the user's own for training or those to evaluate on."""

import json
from pathlib import Path

from cluster.errors import UserError
from cluster.jsonl import numbered_lines

_FIELDS = ("turns", "question", "prompt", "problem")


def read_questions(file: Path) -> list[str]:
    """The text of each line's first field of `turns` (its first turn), `question`, `prompt` and `problem`.

    Raises UserError for a file or a line that can't be read.
    """
    return [_question(line, f"{file}, line {number}") for number, line in numbered_lines(file, "questions")]


def normalised(text: str) -> str:
    """What two equal questions have in common whatever their case and spacing."""
    return " ".join(text.lower().split())


def _question(line: str, place: str) -> str:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(place, f"it is no JSON ({error})", "give one JSON object a line") from error
    found = next((values[field] for field in _FIELDS if isinstance(values, dict) and values.get(field)), None)
    text = found[0] if isinstance(found, list) else found
    if not isinstance(text, str):
        raise UserError(place, f"it has none of the fields {', '.join(_FIELDS)}", "name the question one of these")
    return text
