"""SmolLM2-135M-Instruct with its own first 24 of 30 layers as draft: real weights, real acceptance."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.demo_target import demo_target
from cluster.models.folder import open_model
from cluster.models.prompt import encode_prompt
from cluster.models.truncated import truncated_draft
from tests.colocated.conftest import Arms, start_arms

QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")


@pytest.fixture(scope="module")
def smollm2(
    tmp_path_factory: pytest.TempPathFactory, start_engine: Callable[[EngineSettings], InProcessEngine]
) -> Arms:
    target = demo_target()
    draft = truncated_draft(open_model(str(target), role="target"), 24, tmp_path_factory.mktemp("smollm2") / "draft")
    return start_arms("smollm2", target, draft, 3, start_engine)


def questions(target: Path) -> list[GenerationRequest]:
    model = open_model(str(target), role="target")
    prompts = [encode_prompt(model, question, chat=True, context_length=None) for question in QUESTIONS]
    return [GenerationRequest(prompt_token_ids=prompt, max_tokens=24) for prompt in prompts]


def test_answers_with_a_draft_are_those_without_and_drafts_are_accepted_as_measured(smollm2: Arms) -> None:
    requests = questions(demo_target())
    plain, drafted = smollm2.plain.generate(requests), smollm2.colocated.generate(requests)
    assert "Paris" in plain[0].text
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    figures = [completion.acceptance for completion in drafted if completion.acceptance is not None]
    accepted = [sum(part.accepted_by_position[i] for part in figures) for i in range(3)]
    # Over long texts the first draft is right in two rounds of five, and each next one about as often again.
    assert 0.2 < accepted[0] / sum(part.rounds for part in figures) < 0.7
    assert accepted[0] > accepted[1] >= accepted[2]
