"""A target's first layers are a model of their own: a real draft without training."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cluster.errors import UserError
from cluster.models.folder import open_model
from cluster.models.truncated import truncated_draft
from tests.checkpoints import make_pair


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair("qwen3-dspark", tmp_path_factory.mktemp("pair")).target


def draft_of(target: Path, layers: int, folder: Path) -> Path:
    return truncated_draft(open_model(str(target), role="target"), layers, folder)


@torch.inference_mode()
def test_the_draft_computes_what_the_targets_first_layers_compute(tmp_path: Path) -> None:
    """With tied embeddings, in several shards, as published checkpoints are."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    full = LlamaForCausalLM(config)
    full.save_pretrained(tmp_path / "full", max_shard_size="50KB")
    assert len([*(tmp_path / "full").glob("*.safetensors")]) > 1

    draft = AutoModelForCausalLM.from_pretrained(draft_of(tmp_path / "full", 2, tmp_path / "draft"))
    full.model.layers = full.model.layers[:2]
    text = torch.arange(24)[None]
    torch.testing.assert_close(draft(text).logits, full(text).logits)


def test_the_draft_keeps_the_tokenizer_and_has_as_many_layer_types_as_layers(tiny_target: Path, tmp_path: Path) -> None:
    folder = draft_of(tiny_target, 3, tmp_path / "draft")
    assert len(AutoConfig.from_pretrained(folder).layer_types) == 3
    assert AutoTokenizer.from_pretrained(folder).encode("Hi") == AutoTokenizer.from_pretrained(tiny_target).encode("Hi")


def test_a_draft_that_is_there_is_taken_as_it_is(tiny_target: Path, tmp_path: Path) -> None:
    folder = draft_of(tiny_target, 3, tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    assert draft_of(tiny_target, 3, folder) == folder
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("layers", [0, 4])
def test_a_draft_must_be_shorter_than_its_target_and_not_empty(layers: int, tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 4; choose fewer, and at least 1"):
        draft_of(tiny_target, layers, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
