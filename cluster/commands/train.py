"""`dspark-cluster train-draft`: a DSpark draft for a target, from prompts to figures.

With `--json`, one object on standard output: `draft` (its folder), `parameters`, `dialogues`, and `evaluation`, for
each file of questions what `generate --json` calls `speculation`.
"""

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cluster.commands.terminal import messages
from cluster.engine.cpu import profile
from cluster.errors import UserError
from cluster.models.folder import ModelFolder, open_model
from cluster.speculation.figures import AcceptanceFigures
from cluster.training.answers import AnswerSettings, make_dialogues
from cluster.training.data import Batches, Dialogue, read_dialogues
from cluster.training.evaluation import QuestionSet, evaluate
from cluster.training.layout import save_draft
from cluster.training.loop import TrainingReport, TrainingSettings, train
from cluster.training.model import (
    DraftModel,
    DraftShape,
    TargetModel,
    check_family,
    choose_mask_token,
    count_parameters,
    default_device,
    draft_shape,
)
from cluster.training.questions import read_questions

_EVALUATION_CONTEXT = 2048

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What `train-draft` is asked for. `output` gets the draft, and in `output`/training what resuming needs."""

    target: str
    output: Path
    prompts: tuple[Path, ...] = ()
    evaluate: tuple[Path, ...] = ()
    evaluate_limit: int | None = None
    evaluate_tokens: int = 256
    num_prompts: int = 60_000
    max_tokens: int = 320
    max_length: int = 640
    sampled: float = 0.1
    engines: int = 1
    num_layers: int = 3
    intermediate_size: int | None = None
    block_size: int = 7
    markov_rank: int = 32
    auxiliary_layers: int = 5
    steps: int = 8_000
    batch_size: int = 64
    anchors: int = 64
    learning_rate: float = 1.5e-3
    checkpoint_steps: int = 1_000
    seed: int = 0
    json_output: bool = False

    def tiny(self) -> "TrainOptions":
        """The same run in sizes that end in seconds: every stage on a CPU, and a draft that is good for nothing."""
        return replace(
            self,
            num_prompts=24,
            max_tokens=16,
            max_length=256,
            num_layers=1,
            intermediate_size=32,
            markov_rank=4,
            auxiliary_layers=2,
            steps=6,
            batch_size=4,
            anchors=4,
            checkpoint_steps=3,
            evaluate_limit=2,
            evaluate_tokens=16,
        )


def train_draft(options: TrainOptions) -> dict[str, AcceptanceFigures]:
    """Make answers, train, save and evaluate; what an earlier run into the same folder has done is kept.

    Raises UserError for a target, files or sizes that can't work, and for a folder with a run of other settings.
    """
    target = open_model(options.target, role="target")
    check_family(target)
    own = [text for file in options.prompts for text in read_questions(file)]
    sets = [_question_set(file, options.evaluate_limit) for file in options.evaluate]
    held_out = [text for file in options.evaluate for text in read_questions(file)]
    work = options.output / "training"
    _claim(work, options)

    _make_answers(options, own, held_out, work)
    dialogues = _dialogues(work)
    parameters = _train(target, dialogues, options, work)
    figures: dict[str, AcceptanceFigures] = {}
    if sets:
        arguments = (options.target, str(options.output), sets, options.evaluate_tokens)
        figures = _in_new_processes(_evaluate, [arguments])[0]
    if options.json_output:
        document = {
            "draft": str(options.output),
            "parameters": parameters,
            "dialogues": len(dialogues),
            "evaluation": {name: part.to_json() for name, part in figures.items()},
        }
        print(json.dumps(document))
    elif figures:
        Console().print(_table(figures))
    return figures


def _claim(work: Path, options: TrainOptions) -> None:
    """Write down what shapes the run, or compare it with what is there: a resumed run can't change it."""
    free = ("output", "evaluate_limit", "evaluate_tokens", "checkpoint_steps", "json_output")
    settings = {name: value for name, value in asdict(options).items() if name not in free}
    text = json.dumps(settings, indent=2, default=str) + "\n"
    file = work / "settings.json"
    try:
        work.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(text, encoding="utf-8")
        known = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"output {options.output}", str(error), "name a folder that you may write") from error
    wanted = json.loads(text)
    if changed := [name for name in wanted if known.get(name) != wanted[name]]:
        name = changed[0]
        raise UserError(
            f"output {options.output}",
            f"a run with {name} = {known.get(name)} is there, and this one has {wanted[name]}",
            "repeat its options to resume it, or name another folder",
        )


def _question_set(file: Path, limit: int | None) -> QuestionSet:
    return QuestionSet(name=file.stem, questions=tuple(read_questions(file)[:limit]))


def _make_answers(options: TrainOptions, own: Sequence[str], held_out: Sequence[str], work: Path) -> None:
    """Every engine makes a part of the prompts, of its own seed, and answers it into a file of its own."""
    parts = []
    for index in range(options.engines):
        settings = AnswerSettings(
            num_prompts=options.num_prompts // options.engines,
            max_tokens=options.max_tokens,
            max_length=options.max_length,
            sampled=options.sampled,
            seed=options.seed + index,
            shared=options.engines > 1,
        )
        file = work / f"answers-{index}.jsonl"
        parts.append((options.target, own[index :: options.engines], held_out, settings, file))
    _in_new_processes(_answer, parts)


def _dialogues(work: Path) -> list[Dialogue]:
    """All engines' dialogues, of which two may have put the same prompt."""
    files = sorted(work.glob("answers-*.jsonl"))
    return list({dialogue.prompt: dialogue for file in files for dialogue in read_dialogues(file)}.values())


def _shape(target: ModelFolder, options: TrainOptions) -> DraftShape:
    return draft_shape(
        target,
        num_layers=options.num_layers,
        intermediate_size=options.intermediate_size or int(target.text_config["intermediate_size"]),
        block_size=options.block_size,
        markov_rank=options.markov_rank,
        num_auxiliary_layers=options.auxiliary_layers,
        mask_token_id=choose_mask_token(target),
    )


def _train(target: ModelFolder, dialogues: Sequence[Dialogue], options: TrainOptions, work: Path) -> int:
    """Train to the end, save the draft and return how many parameters it has."""
    import torch

    batches = Batches(dialogues, size=options.batch_size, max_length=options.max_length, seed=options.seed)
    if not len(batches):
        raise UserError("no answers to train on", "the target gave none of two tokens or more", "give more prompts")
    device = default_device()
    torch.manual_seed(options.seed)
    shape = _shape(target, options)
    model = DraftModel(shape).to(device)
    settings = TrainingSettings(
        steps=options.steps,
        batch_size=options.batch_size,
        anchors=options.anchors,
        learning_rate=options.learning_rate,
        checkpoint_steps=options.checkpoint_steps,
        seed=options.seed,
    )
    messages.print(f"training {count_parameters(model):,} parameters on {device.type}", style="dim")
    with _progress() as progress:
        task = progress.add_task("training", total=options.steps)
        train(
            model,
            TargetModel(target, shape.target_layer_ids, device),
            batches,
            settings,
            folder=work,
            on_step=lambda done: progress.update(task, completed=done),
            on_report=lambda report: progress.console.print(_line(report), style="dim"),
        )
    save_draft(model, options.output)
    return count_parameters(model)


def _line(report: TrainingReport) -> str:
    return (
        f"step {report.step}: loss {report.loss:.3f} (cross-entropy {report.cross_entropy:.3f},"
        f" divergence {report.divergence:.3f}), acceptance length {report.acceptance_length:.2f}"
    )


def _answer(target: str, own: Sequence[str], held_out: Sequence[str], settings: AnswerSettings, file: Path) -> None:
    with _progress() as progress:
        tasks: dict[str, Any] = {}

        def advance(stage: str, more: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=None)
            progress.advance(tasks[stage], more)

        make_dialogues(open_model(target, role="target"), own, held_out, settings, file, advance)


def _evaluate(target: str, draft: str, sets: Sequence[QuestionSet], max_tokens: int) -> dict[str, AcceptanceFigures]:
    model = open_model(target, role="target")
    context = min(_EVALUATION_CONTEXT, model.integer("max_position_embeddings") or _EVALUATION_CONTEXT)
    with _progress() as progress:
        task = progress.add_task("evaluation", total=sum(len(part.questions) for part in sets))
        return evaluate(
            model,
            open_model(draft, role="draft"),
            sets,
            max_tokens=max_tokens,
            max_model_len=context,
            advance=lambda done: progress.update(task, completed=done),
        )


def _in_new_processes(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Run a stage that starts engines where their memory ends with it: training wants the whole GPU."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(calls), mp_context=context, initializer=profile.activate) as pool:
        return [future.result() for future in [pool.submit(function, *arguments) for arguments in calls]]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=messages)


def _table(figures: dict[str, AcceptanceFigures]) -> Table:
    positions = max(len(part.accepted_by_position) for part in figures.values())
    table = Table("questions", "rounds", "acceptance length", *map(str, range(1, positions + 1)), box=None)
    for name, part in figures.items():
        rates = (f"{rate:.0%}" for rate in part.rate_by_position)
        table.add_row(name, f"{part.rounds:,}", f"{part.acceptance_length:.2f}", *rates)
    return table
