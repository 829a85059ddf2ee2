"""What is trained is what vLLM runs, and the command goes from a target to a measured draft."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import ModelFolder, open_model
from cluster.training.data import Dialogue, read_dialogues
from cluster.training.layout import save_draft
from cluster.training.model import DraftModel, TargetModel, choose_mask_token, draft_shape
from tests.checkpoints import make_pair

DEADLINE_S = 600  # two engines, each in a process of its own, on a busy machine
PROMPT = (7, 301, 44, 9, 128, 77, 450, 21, 333, 60, 12)


@torch.inference_mode()
def test_the_training_module_gives_the_logits_of_vllms_draft(
    tmp_path: Path, start_engine: Callable[[EngineSettings], InProcessEngine]
) -> None:
    """Random weights: next to nothing is accepted, so that there are many rounds."""
    target = open_model(str(make_pair("qwen3-dspark", tmp_path / "pair").target), role="target")
    model = random_draft(target)
    save_draft(model, tmp_path / "draft")
    engine = start_engine(
        EngineSettings(
            target=target,
            speculation=plan_speculation(target, open_model(str(tmp_path / "draft"), role="draft"), None),
            max_model_len=128,
            max_num_seqs=1,
            num_gpu_blocks=8,
        )
    )
    seen = record_logits(speculator(engine).model)
    completion = engine.generate([GenerationRequest(prompt_token_ids=PROMPT, max_tokens=12, ignore_eos=True)])[0]

    text = torch.tensor([[*PROMPT, *completion.token_ids]])
    reference = TargetModel(target, model.shape.target_layer_ids, torch.device("cpu"))
    states, _ = reference.states(text)
    anchors = torch.arange(len(PROMPT), text.shape[1])[None]
    inputs = torch.full((1, anchors.shape[1], model.shape.block_size), model.shape.mask_token_id)
    inputs[..., 0] = text[0, len(PROMPT) :]
    logits = model(states, reference.embed(inputs), anchors)[0] @ reference.head.T
    # A round's anchor is its target's own token: the next round's comes after as many more as were accepted.
    rounds = [0, *itertools.accumulate(accepted + 1 for accepted in completion.accepted_by_round[:-1])]
    assert len(rounds) > 5
    torch.testing.assert_close(logits[rounds], torch.stack(seen[: len(rounds)]), atol=1e-4, rtol=1e-4)


def random_draft(target: ModelFolder) -> DraftModel:
    """Every weight is random, norms too, so that none left out goes unnoticed; rounded as it will be saved."""
    torch.manual_seed(0)
    model = DraftModel(
        draft_shape(
            target,
            num_layers=2,
            intermediate_size=48,
            block_size=5,
            markov_rank=8,
            num_auxiliary_layers=3,
            mask_token_id=choose_mask_token(target),
        )
    )
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
        parameter.copy_(parameter.bfloat16())
    return model


def speculator(engine: InProcessEngine) -> Any:
    return engine.vllm_engine.model_executor.driver_worker.worker.model_runner.speculator


def record_logits(draft: Any) -> list[torch.Tensor]:
    """From now on, the logits of every round before the Markov bias, [K, V]."""
    seen: list[torch.Tensor] = []
    compute = draft.compute_draft_logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        seen.append(logits.clone())
        return logits

    draft.compute_draft_logits = recording
    return seen


def test_a_dry_run_goes_through_every_stage_and_keeps_questions_to_evaluate_on_out_of_training(tmp_path: Path) -> None:
    """One question is among the user's prompts and to be evaluated on: it must not be trained on."""
    target = make_pair("qwen3-dspark", tmp_path / "pair").target
    (tmp_path / "own.jsonl").write_text('{"prompt": "Who am I?"}\n{"prompt": "who  ARE you?"}\n')
    (tmp_path / "held.jsonl").write_text('{"question": "Who are you?"}\n')
    words = ["--target", target, "--output", tmp_path / "draft", "--dry-run", "--json"]
    words += ["--prompts", tmp_path / "own.jsonl", "--evaluate", tmp_path / "held.jsonl"]
    command = [sys.executable, "-m", "cluster.cli", "train-draft", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["evaluation"]["held"]["rounds"] > 0
    assert len(document["evaluation"]["held"]["acceptance_rate_by_position"]) == 7
    prompts = [chat_text(target, dialogue) for dialogue in read_dialogues(tmp_path / "draft/training/answers-0.jsonl")]
    assert document["dialogues"] == len(prompts) > 4
    assert any("Who am I?" in prompt for prompt in prompts)
    assert not any("who are you?" in " ".join(prompt.lower().split()) for prompt in prompts)


def chat_text(target: Path, dialogue: Dialogue) -> str:
    return str(AutoTokenizer.from_pretrained(target).decode(dialogue.prompt))
