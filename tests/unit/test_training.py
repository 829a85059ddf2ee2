"""Training a draft: what it learns from, that it learns, and that a stopped run goes on as if it hadn't stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.errors import UserError
from cluster.models.folder import ModelFolder, open_model
from cluster.training.data import Batches, Dialogue, append_dialogues, read_dialogues
from cluster.training.loop import TrainingReport, TrainingSettings, draw_anchors, train
from cluster.training.loss import block_loss
from cluster.training.model import DraftModel, TargetModel, choose_mask_token, draft_shape
from cluster.training.questions import normalised, read_questions
from tests.checkpoints import make_pair
from tests.checkpoints.vocabulary import MASK_ID, VOCAB_SIZE

CPU = torch.device("cpu")
SETTINGS = TrainingSettings(steps=8, batch_size=4, anchors=6, learning_rate=3e-3, checkpoint_steps=4, seed=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return open_model(str(make_pair("qwen3-dspark", tmp_path_factory.mktemp("pair")).target), role="target")


def new_draft(target: ModelFolder) -> DraftModel:
    torch.manual_seed(0)
    return DraftModel(
        draft_shape(
            target,
            num_layers=1,
            intermediate_size=32,
            block_size=4,
            markov_rank=8,
            num_auxiliary_layers=2,
            mask_token_id=choose_mask_token(target),
        )
    )


def dialogues(count: int = 12) -> list[Dialogue]:
    """Every answer counts on from its prompt's last token, so it can be learnt."""
    firsts = torch.randint(10, VOCAB_SIZE - 80, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return [Dialogue((5, 9, first), tuple(range(first + 1, first + 21 + index))) for index, first in enumerate(firsts)]


def run(target: ModelFolder, folder: Path, settings: TrainingSettings) -> tuple[DraftModel, list[TrainingReport]]:
    folder.mkdir(exist_ok=True)
    model, reports = new_draft(target), list[TrainingReport]()
    train(
        model,
        TargetModel(target, model.shape.target_layer_ids, CPU),
        Batches(dialogues(), size=settings.batch_size, max_length=64, seed=settings.seed),
        settings,
        folder=folder,
        on_step=lambda _: None,
        on_report=reports.append,
    )
    return model, reports


@torch.no_grad()
def test_auxiliary_states_are_what_leaves_the_layers_that_the_config_names(target: ModelFolder) -> None:
    """Layer i's output is hidden_states[i + 1], since these begin with the embeddings; vLLM adds the 1 as well."""
    text, ids = torch.arange(10, 30)[None], (0, 1, 2)
    states, last = TargetModel(target, ids, CPU).states(text)
    whole = AutoModelForCausalLM.from_pretrained(target.path)(text, output_hidden_states=True)
    assert torch.equal(states, torch.cat([whole.hidden_states[i + 1] for i in ids], dim=-1))
    assert torch.equal(last, whole.hidden_states[-1])


def test_the_mask_is_a_special_token_that_no_conversation_has(target: ModelFolder) -> None:
    assert choose_mask_token(target) == MASK_ID


@torch.no_grad()
def test_a_block_sees_what_stands_before_its_anchor_and_no_other_block(target: ModelFolder) -> None:
    model = new_draft(target)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(1, 24, 2 * 64, generator=generator)
    blocks = torch.randn(1, 3, 4, 64, generator=generator)
    anchors = torch.tensor([[20, 5, 11]])
    together = model(states, blocks, anchors)
    for index, anchor in enumerate(anchors[0].tolist()):
        alone = model(states[:, :anchor], blocks[:, index : index + 1], anchors[:, index : index + 1])
        torch.testing.assert_close(together[:, index], alone[:, 0], atol=1e-5, rtol=1e-5)


def test_anchors_are_different_answer_tokens_with_a_successor() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    starts, ends = torch.tensor([3, 10]), torch.tensor([12, 13])
    anchors = draw_anchors(tokens, starts, ends, 6, torch.Generator().manual_seed(0))
    assert len({*anchors[0].tolist()}) == 6
    assert set(anchors[0].tolist()) <= set(range(3, 11))
    # Only two are possible in the second row; the end fills up, and blocks there count for nothing.
    assert sorted(anchors[1].tolist()) == [10, 11, 13, 13, 13, 13]


def test_the_loss_counts_drafts_before_the_first_wrong_one_and_nothing_beyond_the_end() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    logits = torch.nn.functional.one_hot(tokens, 8).float() * 9
    logits[0, 1] = 0.0  # its best is token 0: wrong, so that the third, which is right, is lost too
    loss = block_loss(
        logits=logits, target_logits=logits, confidence_logits=torch.zeros(2, 3), tokens=tokens, valid=valid
    )
    assert loss.acceptance_length.item() == 1 + (1 + 2) / 2
    assert loss.divergence.item() == pytest.approx(0.0, abs=1e-6)
    beyond = logits.clone()
    beyond[1, 2] = torch.randn(8)
    again = block_loss(
        logits=beyond, target_logits=logits, confidence_logits=torch.zeros(2, 3), tokens=tokens, valid=valid
    )
    assert torch.equal(again.total, loss.total)


def test_training_lowers_the_loss(target: ModelFolder, tmp_path: Path) -> None:
    _, reports = run(target, tmp_path, replace(SETTINGS, steps=150, checkpoint_steps=150))
    assert [report.step for report in reports] == [50, 100, 150]
    assert reports[-1].loss < 0.7 * reports[0].loss
    assert reports[-1].acceptance_length > 1.5
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [50, 100, 150]


def test_a_stopped_run_ends_as_an_unbroken_one(target: ModelFolder, tmp_path: Path) -> None:
    whole, _ = run(target, tmp_path / "whole", SETTINGS)

    class StopError(Exception):
        pass

    def stop(step: int) -> None:
        if step == 6:
            raise StopError

    model = new_draft(target)
    (tmp_path / "parts").mkdir()
    with pytest.raises(StopError):
        train(
            model,
            TargetModel(target, model.shape.target_layer_ids, CPU),
            Batches(dialogues(), size=SETTINGS.batch_size, max_length=64, seed=SETTINGS.seed),
            SETTINGS,
            folder=tmp_path / "parts",
            on_step=stop,
            on_report=lambda _: None,
        )
    resumed, _ = run(target, tmp_path / "parts", SETTINGS)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_batches_go_through_all_dialogues_each_epoch_in_another_order() -> None:
    batches = Batches(dialogues(), size=4, max_length=64, seed=0)
    first, second = ([batches[step] for step in range(start, start + 3)] for start in (0, 3))
    lengths = [sorted(int(end) for batch in epoch for end in batch.ends) for epoch in (first, second)]
    assert lengths[0] == lengths[1] == [3 + 20 + index for index in range(12)]
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
    assert all(batch.tokens.shape[1] % 8 == 0 for batch in first)


def test_half_a_line_of_a_stopped_run_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    append_dialogues(file, dialogues(3))
    with file.open("a") as text:
        text.write('{"prompt": [1, 2')
    assert read_dialogues(file) == dialogues(3)
    append_dialogues(file, dialogues(4)[3:])
    assert read_dialogues(file) == dialogues(4)


def test_questions_are_read_from_any_of_the_usual_fields(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["A", "B"]}\n\n{"question": "C", "answer": "D"}\n{"prompt": "E"}\n')
    assert read_questions(file) == ["A", "C", "E"]
    assert normalised(" What\n IS it? ") == normalised("what is it?")


@pytest.mark.parametrize("within", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path: Path, within: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(f'{{"prompt": "A{within}B"}}\r\n\r\n{{"prompt": "C"}}'.encode())
    assert read_questions(file) == [f"A{within}B", "C"]


@pytest.mark.parametrize("line", ["{", '{"text": "A"}', "[1]", '{"turns": []}'])
def test_a_line_without_a_question_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "E"}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        read_questions(file)
