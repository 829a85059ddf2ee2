"""`dspark-cluster eval gsm8k`: exact-match accuracy with speculation and without, by two resumable batches."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import typer
from rich.markup import escape

from cluster.batch.lines import BatchInput, BatchLine
from cluster.batch.output import BatchOutput
from cluster.batch.tally import Tally
from cluster.client import Request, Sampling, SpeculationOptions, Stopping
from cluster.commands.batch import EXIT_INCOMPLETE, EXIT_INTERRUPTED, BatchOptions, answer_missing
from cluster.commands.generate_remote import RemoteOptions, ask_model
from cluster.commands.terminal import messages
from cluster.contract.codec import to_text
from cluster.errors import UserError
from cluster.evaluation.gsm8k import STOP, Question, answer_in, prompt, read_questions
from cluster.evaluation.score import read_answers, score
from cluster.outputs import unwritable, write_whole

EVAL_SCHEMA: Final = "dspark-cluster/eval/1"
"""Another number for any change that could break a reader."""

EXIT_BELOW: Final = 1

ARMS: Final = {"speculation": None, "plain": False}
"""By name, what a request says of speculation: None leaves it to the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """`min_accuracy` and `min_acceptance_length` are gates; None is none."""

    data: Path
    output: Path
    limit: int | None
    chat: bool
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int | None
    patience_s: float
    min_accuracy: float | None
    min_acceptance_length: float | None
    json_output: bool


def eval_gsm8k(options: EvalOptions, server: Callable[[], AbstractContextManager[RemoteOptions]]) -> None:
    """Ask every question twice, and write `results.json` into the output folder, with every answer.

    Exit code 0: done, and above the gates; 1: below one, or some have no answer, and the command can be repeated; 130:
    interrupted, likewise. Raises UserError for what is wrong from the start, a server without a draft included.
    """
    questions = read_questions(options.data, options.limit)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(options.output, error) from error
    with ExitStack() as opened:
        remote: RemoteOptions | None = None
        for arm, enabled in ARMS.items():
            whole, defaults = _batch(questions, options, enabled)
            with BatchOutput(_answers(options, arm), whole, defaults) as output:
                tally = Tally(total=len(whole.lines), before=len(output.done))
                known = f", {tally.before:,} of them with their answers from before" if tally.before else ""
                messages.print(f"{arm}: {tally.total:,} questions{known}")
                if tally.complete:
                    continue
                if remote is None:
                    remote = opened.enter_context(server())
                    _require_draft(remote)
                if answer_missing(remote, _batch_options(options, arm), whole, output, tally):
                    raise typer.Exit(EXIT_INTERRUPTED)
                if not tally.complete:
                    messages.print(escape(f"failures: {output.failures}; the same command again tries them"))
                    raise typer.Exit(EXIT_INCOMPLETE)
    whole_result = _result(questions, options)
    try:
        write_whole(options.output / "results.json", to_text(whole_result))
    except OSError as error:
        raise unwritable(options.output, error) from error
    _show(whole_result, options)
    below = list(_below(whole_result, options))
    for said in below:
        messages.print(said, style="red", soft_wrap=True)
    if below:
        raise typer.Exit(EXIT_BELOW)


def _require_draft(remote: RemoteOptions) -> None:
    if ask_model(remote.connection()).draft is None:
        raise UserError(
            f"server {remote.address}", "it has no draft, so there is nothing to compare", "serve the target with one"
        )


def _batch(
    questions: Sequence[Question], options: EvalOptions, enabled: bool | None
) -> tuple[BatchInput, dict[str, Any]]:
    """The requests, and what other answers would come from."""
    asked: dict[str, Any] = {"chat": options.chat, "max_tokens": options.max_tokens, "temperature": options.temperature}
    asked |= {"seed": options.seed, "speculation": enabled}
    lines = tuple(
        BatchLine(
            index=index,
            id=None,
            request=Request(
                prompt=prompt(question, chat=options.chat),
                sampling=Sampling(temperature=options.temperature, seed=options.seed),
                stopping=Stopping(max_tokens=options.max_tokens, stop_strings=() if options.chat else STOP),
                speculation=SpeculationOptions(enabled=enabled),
            ),
        )
        for index, question in enumerate(questions)
    )
    digest = hashlib.sha256(json.dumps([asdict(line.request) for line in lines]).encode()).hexdigest()
    return BatchInput(file=options.data, digest=digest, lines=lines), asked


def _batch_options(options: EvalOptions, arm: str) -> BatchOptions:
    return BatchOptions(
        input=options.data,
        output=_answers(options, arm),
        defaults={},
        patience_s=options.patience_s,
        concurrency=options.concurrency,
    )


def _answers(options: EvalOptions, arm: str) -> Path:
    return options.output / f"{arm}.jsonl"


def _result(questions: Sequence[Question], options: EvalOptions) -> dict[str, Any]:
    scored = {arm: score(questions, read_answers(_answers(options, arm)), answer_in) for arm in ARMS}
    figures = {arm: each for arm, (each, _) in scored.items()}
    items = {arm: each for arm, (_, each) in scored.items()}
    if figures["speculation"]["acceptance"] is None:
        raise UserError("the draft", "it has proposed nothing", "look at the server's log")
    pairs = zip(items["speculation"], items["plain"], strict=True)
    return {
        "schema": EVAL_SCHEMA,
        "task": "gsm8k",
        "questions": len(questions),
        "chat": options.chat,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        **figures,
        "same_outputs": sum(one["token_ids"] == other["token_ids"] for one, other in pairs),
        "items": [
            {
                "index": index,
                "question": question.text,
                "expected": str(question.answer),
                **{arm: items[arm][index] for arm in ARMS},
            }
            for index, question in enumerate(questions)
        ],
    }


def _below(whole: dict[str, Any], options: EvalOptions) -> Iterator[str]:
    gates = (
        ("accuracy", whole["speculation"]["accuracy"], options.min_accuracy),
        ("acceptance-length", whole["speculation"]["acceptance"]["acceptance_length"], options.min_acceptance_length),
    )
    for name, reached, least in gates:
        if least is not None and reached < least:
            yield f"{name.replace('-', ' ')} {reached:.3f} is below --min-{name} {least:g}"


def _show(whole: dict[str, Any], options: EvalOptions) -> None:
    if options.json_output:
        print(to_text(whole), end="")
    for arm in ARMS:
        figures = whole[arm]
        line = f"{arm}: accuracy {figures['accuracy']:.3f}, {figures['correct']} of {whole['questions']}"
        if (accepted := figures["acceptance"]) is not None:
            by_position = " ".join(f"{rate:.0%}" for rate in accepted["acceptance_rate_by_position"])
            line += f"; acceptance length {accepted['acceptance_length']:.3f}, accepted by position {by_position}"
        messages.print(line, soft_wrap=True)
    messages.print(f"the same tokens: {whole['same_outputs']} of {whole['questions']} answers")
    messages.print(escape(f"results: {(options.output / 'results.json').absolute()}"), soft_wrap=True)
