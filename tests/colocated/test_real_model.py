"""SmolLM2-135M-Instruct with the trained draft that comes with the package: real weights, real acceptance."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.demo_draft import demo_draft_dir
from cluster.models.demo_target import demo_target
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.models.prompt import encode_prompt
from cluster.speculation.figures import AcceptanceFigures
from tests.colocated.conftest import Arms, start_arms

DRAFT_SHA256 = "5e831f56473dbf087f5b7e2367b66b1640fd70f643d0d1ff7ea203b78f87ef2a"
# None is a training prompt.
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "A farmer keeps 14 hens and each of them lays 5 eggs a week. How many eggs are that in 3 weeks?",
    "Explain in a few words why the sky is blue.",
    "Invite a friend to dinner on Saturday evening.",
)


@pytest.fixture(scope="module")
def smollm2(start_engine: Callable[[EngineSettings], InProcessEngine]) -> Arms:
    target, draft = demo_target(), demo_draft_dir()
    folder = open_model(str(target), role="target")
    tokens = plan_speculation(folder, open_model(str(draft), role="draft"), None).num_speculative_tokens
    assert tokens == 7
    return start_arms("smollm2", target, draft, tokens, start_engine)


def questions(target: Path) -> list[GenerationRequest]:
    model = open_model(str(target), role="target")
    prompts = [encode_prompt(model, question, chat=True, context_length=None) for question in QUESTIONS]
    return [GenerationRequest(prompt_token_ids=prompt, max_tokens=24) for prompt in prompts]


def test_the_drafts_weights_are_those_that_its_card_describes() -> None:
    weights = demo_draft_dir() / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == DRAFT_SHA256
    assert weights.stat().st_size < 30e6
    assert DRAFT_SHA256 in (demo_draft_dir() / "README.md").read_text()


def test_answers_with_the_draft_are_those_without_and_two_tokens_come_a_round(smollm2: Arms) -> None:
    requests = questions(demo_target())
    plain, drafted = smollm2.plain.generate(requests), smollm2.colocated.generate(requests)
    assert "Paris" in plain[0].text
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    parts = [completion.acceptance for completion in drafted if completion.acceptance is not None]
    accepted = tuple(map(sum, zip(*(part.accepted_by_position for part in parts), strict=True)))
    figures = AcceptanceFigures(
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted_by_position=accepted,
    )
    assert figures.acceptance_length > 2.0
    assert sorted(accepted, reverse=True) == list(accepted)
