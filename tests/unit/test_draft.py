"""The speculation method is found as users of vLLM expect."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.draft_path import neutral_draft_path
from cluster.errors import UserError
from cluster.models.draft import auxiliary_layers, detect_method, plan_speculation, trained_tokens
from cluster.models.folder import ModelFolder


def folder(name: str, architecture: str = "Qwen3ForCausalLM", **config: Any) -> ModelFolder:
    values = {"architectures": [architecture], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4} | config
    return ModelFolder(name=name, path=Path(name), config=values)


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        (folder("/models/d", "Qwen3DSparkModel"), "dspark"),
        (folder("/models/d", "Gemma4DSparkModel"), "dspark"),
        (folder("/models/d", "DSparkDraftModel"), "dspark"),
        (folder("/models/d", "DFlashDraftModel"), "dflash"),
        (folder("/models/d", "LlamaForCausalLMEagle3"), "eagle3"),
        (folder("/models/d", "Eagle3Qwen3ForCausalLM"), "eagle3"),
        (folder("deepseek-ai/dspark_qwen3_8b_block7"), "dspark"),
        (folder("/models/Qwen3-8B-DFlash"), "dflash"),
        (folder("/models/qwen3_8b_eagle3"), "eagle3"),
        (folder("/models/DeepSeek-V4-Flash", "DeepseekV4ForCausalLM", dspark_block_size=5), "dspark"),
        (folder("/models/Qwen3-0.6B"), "draft_model"),
        # The folders above say nothing: this is where dspark-cluster keeps its own models.
        (folder("/home/me/.cache/dspark-cluster/models/Qwen3-0.6B"), "draft_model"),
    ],
)
def test_the_method_follows_architecture_then_name(draft: ModelFolder, method: str) -> None:
    assert detect_method(draft) == method


@pytest.mark.parametrize(
    "config",
    [
        {"target_layer_ids": [0, 2], "block_size": 5},
        {"dspark_target_layer_ids": [0, 2], "dspark_block_size": 5},
        {"dflash_config": {"target_layer_ids": [0, 2]}, "block_size": 5},
    ],
)
def test_a_drafts_own_keys_are_accepted_as_they_come(config: dict[str, Any]) -> None:
    draft = folder("/models/d", "Gemma4DSparkModel", **config)
    assert auxiliary_layers(draft) == (0, 2)
    assert trained_tokens(draft, "dspark") == 5
    assert plan_speculation(folder("/models/t"), draft, None).num_speculative_tokens == 5


def test_dflash_spends_the_first_place_of_its_block_on_the_last_known_token() -> None:
    assert trained_tokens(folder("/models/d", "DFlashDraftModel", block_size=16), "dflash") == 15


def test_a_nested_text_config_is_where_the_numbers_are() -> None:
    target = folder("/models/t", text_config={"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 9})
    draft = folder("/models/d", "Gemma4DSparkModel", target_layer_ids=[8], block_size=4)
    assert plan_speculation(target, draft, 3).num_speculative_tokens == 3


def test_an_assistant_may_be_narrower_than_the_states_that_it_reads() -> None:
    """As Gemma 4's: the size of the target's states is beside its own text config."""
    text = {"vocab_size": 512, "hidden_size": 16, "num_hidden_layers": 2}
    narrow = folder("d", "Gemma4AssistantForCausalLM", text_config=text, backbone_hidden_size=64)
    assert plan_speculation(folder("t"), narrow, 3).method == "mtp"
    of_another = folder("d", "Gemma4AssistantForCausalLM", text_config=text, backbone_hidden_size=32)
    with pytest.raises(UserError, match="reads hidden states of size 32"):
        plan_speculation(folder("t"), of_another, 3)


def test_a_path_that_names_a_method_gets_another_name_and_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain, named = Path("/models/Qwen3-0.6B"), tmp_path / "dspark-cluster" / "draft"
    named.mkdir(parents=True)
    assert neutral_draft_path(plain) == plain
    link = neutral_draft_path(named)
    assert link.resolve() == named
    assert "dspark" not in str(link)
    assert neutral_draft_path(named) == link


def test_links_of_another_user_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    link = neutral_draft_path(Path("/models/dspark"))
    link.unlink()
    link.parent.rename(tmp_path / "theirs")
    link.parent.symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="no folder of this user's"):
        neutral_draft_path(Path("/models/dspark"))
