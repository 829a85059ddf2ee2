"""How many tokens a round the draft gives, measured by vLLM itself on questions that it wasn't trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import ModelFolder
from cluster.speculation.figures import AcceptanceFigures
from cluster.training.chat import Chat

_MAX_SEQS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions under a name, each to be asked as a user's message by the chat template."""

    name: str
    questions: tuple[str, ...]


def evaluate(
    target: ModelFolder,
    draft: ModelFolder,
    sets: Sequence[QuestionSet],
    *,
    max_tokens: int,
    max_model_len: int,
    advance: Callable[[int], None],
) -> dict[str, AcceptanceFigures]:
    """Greedy acceptance on each set, the draft proposing as many tokens as it was trained for.

    `advance` is told how many questions of all are answered.
    """
    settings = EngineSettings(
        target=target,
        speculation=plan_speculation(target, draft, None),
        max_model_len=max_model_len,
        max_num_seqs=_MAX_SEQS,
    )
    chat = Chat(target)
    figures = {}
    answered = 0
    with InProcessEngine(settings) as engine:
        for part in sets:
            requests = [
                GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens)
                for prompt in chat.encode(part.questions)
                if len(prompt) < max_model_len
            ]
            measured = []
            for delta in engine.stream(requests):
                if delta.acceptance is not None:
                    measured.append(delta.acceptance)
                if delta.finish_reason is not None:
                    answered += 1
                    advance(answered)
            figures[part.name] = _together(measured)
    return figures


def _together(parts: Sequence[AcceptanceFigures]) -> AcceptanceFigures:
    return AcceptanceFigures(
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted_by_position=tuple(map(sum, zip(*(part.accepted_by_position for part in parts), strict=True))),
    )
