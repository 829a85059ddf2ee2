"""What a user can get wrong ends in one line that says what, why and what to do, and in exit code 2."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.checkpoints import TinyPair, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair("qwen3-dspark", tmp_path_factory.mktemp("pair"))


@pytest.fixture
def copied(pair: TinyPair, tmp_path: Path) -> TinyPair:
    """The pair in a place of its own, to be damaged."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(pair.target, target)
    shutil.copytree(pair.draft, draft)
    return TinyPair(name=pair.name, target=target, draft=draft, method=pair.method, num_speculative_tokens=4)


def refused(*arguments: object, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr.strip()
    assert line.startswith("dspark-cluster: ")
    assert len(line.splitlines()) == 1
    assert "Traceback" not in line
    assert line.count("; ") >= 1, "a remedy follows the reason"
    return line


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("option", [["--strict"], ["--attention-backend", "auto"], ["--kv-cache-dtype", "fp8"]])
def test_a_contracts_option_where_there_is_no_contract(pair: TinyPair, option: list[str]) -> None:
    line = refused("--target", pair.target, "--draft", pair.draft, *option, "hello")
    assert "--placement separate" in line


def test_an_absent_folder(tmp_path: Path) -> None:
    assert "there is no such folder" in refused("--target", tmp_path / "nowhere", "hello")


def test_a_hub_name_without_a_hub() -> None:
    line = refused("--target", "nobody/no-such-model", "hello")
    assert "not on this machine and the hub can't be reached" in line


def test_a_file_in_the_place_of_a_folder(pair: TinyPair) -> None:
    assert "it is a file" in refused("--target", pair.target / "config.json", "hello")


@pytest.mark.parametrize("content", ["{", "[]", "{}", b"\xff"])
def test_an_unreadable_config(copied: TinyPair, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (copied.target / "config.json").write_bytes(data)
    assert "config.json" in refused("--target", copied.target, "hello")


def test_a_folder_without_config(copied: TinyPair) -> None:
    (copied.target / "config.json").unlink()
    assert "has no config.json" in refused("--target", copied.target, "hello")


def test_weights_that_are_cut_off(copied: TinyPair) -> None:
    weights = copied.draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = refused("--target", copied.target, "--draft", copied.draft, "hello")
    assert "model.safetensors can't be read" in line


def test_a_folder_without_weights(copied: TinyPair) -> None:
    (copied.target / "model.safetensors").unlink()
    assert "no *.safetensors" in refused("--target", copied.target, "hello")


def test_a_shard_that_the_index_names_and_nobody_has(copied: TinyPair) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (copied.target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors can't be read" in refused("--target", copied.target, "hello")


def test_a_draft_with_another_vocabulary(copied: TinyPair) -> None:
    edit_config(copied.draft, vocab_size=777)
    line = refused("--target", copied.target, "--draft", copied.draft, "hello")
    assert "its vocabulary has 777 tokens" in line


def test_a_draft_for_another_hidden_size(copied: TinyPair) -> None:
    edit_config(copied.draft, target_hidden_size=4096)
    line = refused("--target", copied.target, "--draft", copied.draft, "hello")
    assert "hidden states of size 4,096" in line


def test_a_draft_that_reads_a_layer_which_the_target_lacks(copied: TinyPair) -> None:
    edit_config(copied.target, num_hidden_layers=2)
    line = refused("--target", copied.target, "--draft", copied.draft, "hello")
    assert "has layers 0 to 1" in line


@pytest.mark.parametrize("tokens", [0, -1, 99])
def test_more_or_fewer_tokens_a_round_than_the_draft_was_trained_for(pair: TinyPair, tokens: int) -> None:
    line = refused("--target", pair.target, "--draft", pair.draft, "--num-speculative-tokens", tokens, "hello")
    assert f"--num-speculative-tokens {tokens}" in line
    assert "was trained for 1 to" in line


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(pair: TinyPair, prompt: str) -> None:
    assert "the prompt is empty" in refused("--target", pair.target, "-", stdin=prompt)


def test_a_prompt_longer_than_the_context(pair: TinyPair) -> None:
    line = refused("--target", pair.target, "--max-model-len", 64, "--no-chat", "word " * 200)
    assert "the context holds 64" in line


def test_a_prompt_file_that_is_not_there(pair: TinyPair, tmp_path: Path) -> None:
    assert "can't be read" in refused("--target", pair.target, "--prompt-file", tmp_path / "none.txt")


def test_two_prompts(pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello")
    assert "two prompts" in refused("--target", pair.target, "--prompt-file", tmp_path / "prompt.txt", "hello")


def test_a_tokenizer_that_cannot_be_read(copied: TinyPair) -> None:
    (copied.target / "tokenizer.json").write_text("{")
    assert "its tokenizer can't be read" in refused("--target", copied.target, "hello")


def test_debug_shows_where_the_error_arose(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "--target", str(tmp_path / "nowhere"), "--debug", "hello"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "open_model" in result.stderr
