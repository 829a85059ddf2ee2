"""Answers of a batch held against what is right."""

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from cluster.evaluation.gsm8k import Question
from cluster.jsonl import numbered_lines
from cluster.speculation.figures import AcceptanceFigures


def read_answers(file: Path) -> dict[int, dict[str, Any]]:
    """By index, each a line of a batch's output. Raises UserError where it can't be read."""
    lines = [json.loads(line) for _, line in numbered_lines(file, "answers")]
    return {line["index"]: line for line in lines}


def score(
    questions: Sequence[Question], answers: dict[int, dict[str, Any]], answer_in: Callable[[str], Decimal | None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of the whole, and one object for each question in their order. Every question has its answer."""
    items = [_item(question, answers[index], answer_in) for index, question in enumerate(questions)]
    correct = sum(item["correct"] for item in items)
    acceptance = _together([item["speculation"] for item in items if item["speculation"] is not None])
    figures = {
        "accuracy": correct / len(items),
        "correct": correct,
        "without_a_number": sum(item["answer"] is None for item in items),
        "cut_off": sum(item["finish_reason"] == "length" for item in items),
        "completion_tokens": sum(item["completion_tokens"] for item in items),
        "acceptance": None if acceptance is None else acceptance.to_json(),
    }
    return figures, items


def _item(question: Question, line: dict[str, Any], answer_in: Callable[[str], Decimal | None]) -> dict[str, Any]:
    (choice,) = line["choices"]
    found = answer_in(choice["text"])
    return {
        "text": choice["text"],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "answer": None if found is None else str(found),
        "correct": found == question.answer,
        "completion_tokens": line["usage"]["completion_tokens"],
        "speculation": choice["speculation"],
    }


def _together(parts: Sequence[dict[str, Any]]) -> AcceptanceFigures | None:
    """None where nothing was drafted."""
    drafted = [_counts(part) for part in parts if part["rounds"]]
    return sum(drafted[1:], drafted[0]) if drafted else None


def _counts(plain: dict[str, Any]) -> AcceptanceFigures:
    rounds = plain["rounds"]
    by_position = tuple(round(rate * rounds) for rate in plain["acceptance_rate_by_position"])
    return AcceptanceFigures(rounds=rounds, drafted=plain["drafted"], accepted_by_position=by_position)
