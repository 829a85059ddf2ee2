"""GSM8K: numbers in texts, and `eval gsm8k` as a user sees it; the server is real, its engine is scripted."""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from actors.cli import app
from cluster.client import ChatPrompt, TextPrompt
from cluster.errors import UserError
from cluster.evaluation.gsm8k import Question, answer_in, prompt, read_questions
from tests.unit.bench.conftest import Answering
from tests.unit.serving.conftest import Served

Start = Callable[[list[str]], tuple[str, Answering]]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### 1,234,567 euros", "1234567"),
        ("#### $-3.50", "-3.5"),
        ("So the answer is 42. That is all.", "42"),
        ("It costs 1,000.", "1000"),
        ("3 and 4 make\n#### 7.00\n", "7"),
        ("#### 5\nQuestion 9: #### 6", "6"),
        ("none at all", None),
        ("there are 7 but #### none", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert answer_in(text) == (None if number is None else Decimal(number))


def test_a_question_is_a_message_or_the_end_of_examples() -> None:
    question = Question(text="How many?", answer=Decimal(3))
    asked = prompt(question, chat=True)
    assert isinstance(asked, ChatPrompt)
    assert asked.messages[0].content.endswith("How many?")
    text = prompt(question, chat=False)
    assert isinstance(text, TextPrompt)
    assert text.text.endswith("Question: How many?\nAnswer:")
    assert text.text.count("####") == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is no JSON"),
        ("[]", "it isn't a question with an answer behind ####"),
        ('{"question": "a", "answer": "18"}', "it isn't a question with an answer behind ####"),
        ('{"question": 1, "answer": "#### 18"}', "it isn't a question with an answer behind ####"),
    ],
)
def test_lines_that_are_no_questions(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(f'{{"question": "a", "answer": "#### 1"}}\n\n{line}\n')
    with pytest.raises(UserError, match=f"line 3: {said}"):
        read_questions(file, None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "gsm8k.jsonl"
    lines = [{"question": f"How much is {number} and 1?", "answer": f"...\n#### {number + 1}"} for number in range(5)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def evaluate(address: str, data: Path, *more: object) -> Result:
    words = ["eval", "gsm8k", "--address", address, "--data", data, "--output", data.parent / "out", "--concurrency", 1]
    return CliRunner().invoke(app, [*map(str, words), *map(str, more)])


def results(data: Path) -> dict[str, Any]:
    return json.loads((data.parent / "out" / "results.json").read_text())  # type: ignore[no-any-return]


def test_accuracy_with_speculation_and_without(answering: Start, data: Path) -> None:
    address, engine = answering([" #### 1", " #### 2", "so 3 it is", "#### 99"])
    result = evaluate(address, data, "--limit", 4, "--seed", 5)
    assert result.exit_code == 0, result.output
    whole = results(data)
    assert whole["speculation"]["accuracy"] == whole["plain"]["accuracy"] == 0.75
    assert whole["speculation"]["acceptance"]["acceptance_length"] == 2.0
    assert whole["plain"]["acceptance"] is None
    assert whole["same_outputs"] == 4
    assert [item["expected"] for item in whole["items"]] == ["1", "2", "3", "4"]
    assert [item["speculation"]["correct"] for item in whole["items"]] == [True, True, True, False]
    assert [request.speculation.enabled for request in engine.asked] == [None] * 4 + [False] * 4
    assert {request.sampling.seed for request in engine.asked} == {5}
    assert "speculation: accuracy 0.750, 3 of 4; acceptance length 2.000" in result.stderr


@pytest.mark.parametrize("within", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(answering: Start, tmp_path: Path, within: str) -> None:
    data = tmp_path / "gsm8k.jsonl"
    line = {"question": f"How much{within}is 0 and 1?", "answer": "#### 1"}
    data.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    address, _ = answering([f" {within}#### 1"])
    result = evaluate(address, data)
    assert result.exit_code == 0, result.output
    (item,) = results(data)["items"]
    assert within in item["question"]
    assert within in item["plain"]["text"]


@pytest.mark.parametrize(
    ("gate", "code", "said"),
    [
        (("--min-accuracy", 0.9), 1, "accuracy 0.800 is below --min-accuracy 0.9"),
        (("--min-accuracy", 0.8), 0, ""),
        (("--min-acceptance-length", 2.5), 1, "acceptance length 2.000 is below --min-acceptance-length 2.5"),
        (("--min-acceptance-length", 2.0), 0, ""),
    ],
)
def test_gates(answering: Start, data: Path, gate: tuple[object, ...], code: int, said: str) -> None:
    address, _ = answering(["#### 1", "#### 2", "#### 3", "#### 4", "#### 0"])
    result = evaluate(address, data, *gate)
    assert result.exit_code == code, result.output
    assert said in result.stderr


def test_a_repeated_command_asks_what_is_missing(answering: Start, data: Path) -> None:
    address, engine = answering(["#### 1"])
    assert evaluate(address, data).exit_code == 0
    answers = data.parent / "out" / "plain.jsonl"
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:2]))
    before = len(engine.asked)
    result = evaluate(address, data)
    assert result.exit_code == 0, result.output
    assert "plain: 5 questions, 2 of them with their answers from before" in result.stderr
    assert len(engine.asked) == before + 3
    other = evaluate(address, data, "--max-tokens", 7)
    assert other.exit_code == 2
    assert "it belongs to another batch" in other.stderr


def test_a_server_without_a_draft_has_nothing_to_compare(start: Callable[..., Served], data: Path) -> None:
    result = evaluate(start().server.address, data)
    assert result.exit_code == 2
    assert "it has no draft, so there is nothing to compare" in result.stderr
