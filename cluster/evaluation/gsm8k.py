"""GSM8K: word problems whose answer is a number, in a file of `question` and `answer`, the number behind `####`."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Final

from cluster.client import ChatMessage, ChatPrompt, TextPrompt
from cluster.errors import UserError
from cluster.jsonl import numbered_lines

_MARK: Final = "####"
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

STOP: Final = ("\nQuestion:",)
"""Where a model without a chat template goes on with a question of its own."""

_INSTRUCTION: Final = "Solve this step by step, and end with a line of #### and the number alone.\n\n"

# Worked examples of our own wording, for models that continue a text.
_EXAMPLES: Final = (
    (
        "A baker fills 6 trays with 12 rolls each and sells 50 rolls. How many rolls are left?",
        "The baker makes 6 * 12 = 72 rolls. After the sale 72 - 50 = 22 are left.\n#### 22",
    ),
    (
        "Mila saves 7 euros a week. How many weeks does she need for a bicycle of 84 euros?",
        "She needs 84 / 7 = 12 weeks.\n#### 12",
    ),
    (
        "A train leaves with 140 passengers. A quarter of them get off, and 18 get on. How many are on it then?",
        "140 / 4 = 35 get off, so 140 - 35 = 105 stay. With 18 more there are 105 + 18 = 123.\n#### 123",
    ),
    (
        "Three boxes weigh 4 kg, 6 kg and 11 kg. What is their average weight in kg?",
        "Together they weigh 4 + 6 + 11 = 21 kg, so on average 21 / 3 = 7 kg.\n#### 7",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`answer` is the number."""

    text: str
    answer: Decimal


def read_questions(file: Path, limit: int | None) -> list[Question]:
    """The file's first `limit` questions. Raises UserError for a file or a line that isn't of GSM8K's form."""
    lines = numbered_lines(file, "questions")
    questions = [_question(line, f"{file}, line {number}") for number, line in lines]
    if not questions:
        raise UserError(f"questions {file}", "there is none in it", "give a file of GSM8K")
    return questions[:limit]


def prompt(question: Question, *, chat: bool) -> TextPrompt | ChatPrompt:
    """A user's message, or a text that goes on with the question's answer."""
    if chat:
        return ChatPrompt(messages=(ChatMessage(role="user", content=_INSTRUCTION + question.text),))
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in _EXAMPLES)
    return TextPrompt(text=f"{shots}Question: {question.text}\nAnswer:")


def answer_in(text: str) -> Decimal | None:
    """The number behind the last `####`; in a text without it, the last number. None where there is no number."""
    _, mark, marked = text.rpartition(_MARK)
    numbers = _NUMBER.findall(marked if mark else text)
    if not numbers:
        return None
    try:
        return Decimal((numbers[0] if mark else numbers[-1]).replace(",", ""))
    except InvalidOperation:
        return None


def _question(line: str, place: str) -> Question:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(place, f"it is no JSON ({error})", "give one JSON object a line") from error
    text, answer = (values.get(name) if isinstance(values, dict) else None for name in ("question", "answer"))
    number = answer_in(answer) if isinstance(answer, str) and _MARK in answer else None
    if not isinstance(text, str) or number is None:
        raise UserError(place, f"it isn't a question with an answer behind {_MARK}", "give a file of GSM8K")
    return Question(text=text, answer=number)
