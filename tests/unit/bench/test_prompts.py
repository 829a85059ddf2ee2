"""What is asked: the same of every arm, and nothing out of another's cache."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench.load.bundled import BUNDLED
from cluster.bench.load.prompts import Shape, make_requests, read_dataset
from cluster.client import ChatPrompt, ModelInfo, TextPrompt, TokenPrompt
from cluster.errors import UserError
from cluster.serving.types import Sampling

INFO = ModelInfo(
    model="m",
    vocab_size=100,
    max_model_len=256,
    has_chat_template=True,
    default_sampling=Sampling(),
    draft=None,
    limits={},
    unimplemented_fields=(),
    vllm_version="0.32.0",
)
SHAPE = Shape(
    num_prompts=5,
    num_warmups=2,
    max_tokens=8,
    input_tokens=None,
    ignore_eos=False,
    temperature=0.0,
    seed=0,
    chat=None,
)


@pytest.mark.parametrize(
    "line",
    [
        {"turns": ["Why?", "And then?"]},
        {"question": "Why?", "answer": "#### 1"},
        {"prompt": "Why?"},
        {"problem": "Why?"},
    ],
)
def test_lines_of_the_usual_datasets(tmp_path: Path, line: dict[str, object]) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert read_dataset(str(file)).prompts == ("Why?",)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="there is no prompt in it"):
        read_dataset(str(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="can't be read"):
        read_dataset(str(tmp_path / "absent.jsonl"))


def test_every_run_asks_the_same_and_salts_it_anew() -> None:
    dataset = read_dataset("bundled")
    first, warm_ups = make_requests(dataset, SHAPE, None, INFO, "cell-0")
    second, _ = make_requests(dataset, SHAPE, None, INFO, "cell-1")
    assert [request.prompt for request in first] == [request.prompt for request in second]
    assert len(first) == 5
    assert len(warm_ups) == 2
    assert len({request.cache_salt for request in (*first, *second, *warm_ups)}) == 12
    other, _ = make_requests(dataset, replace(SHAPE, seed=1), None, INFO, "cell-0")
    assert [request.prompt for request in other] != [request.prompt for request in first]


def test_warm_ups_are_as_many_as_run_at_once_and_change_nothing_that_counts() -> None:
    dataset, shape = read_dataset("bundled"), replace(SHAPE, num_warmups=None)
    few, before_few = make_requests(dataset, shape, 1, INFO, "cell-0")
    many, before_many = make_requests(dataset, shape, 8, INFO, "cell-0")
    assert (len(before_few), len(before_many)) == (1, 8)
    assert few == many


def test_a_small_dataset_is_gone_through_again() -> None:
    shape = replace(SHAPE, num_warmups=0, num_prompts=2 * len(BUNDLED), chat=False)
    requests, _ = make_requests(read_dataset("bundled"), shape, None, INFO, "x")
    texts = [request.prompt.text for request in requests if isinstance(request.prompt, TextPrompt)]
    assert sorted(texts) == sorted(BUNDLED * 2)


def test_chat_follows_the_model_unless_it_is_said() -> None:
    dataset = read_dataset("bundled")
    assert isinstance(make_requests(dataset, SHAPE, None, INFO, "x")[0][0].prompt, ChatPrompt)
    bare = replace(INFO, has_chat_template=False)
    assert isinstance(make_requests(dataset, SHAPE, None, bare, "x")[0][0].prompt, TextPrompt)
    with pytest.raises(UserError, match="has no chat template"):
        make_requests(dataset, replace(SHAPE, chat=True), None, bare, "x")


def test_random_tokens_are_in_the_vocabulary() -> None:
    requests, _ = make_requests(read_dataset("random"), replace(SHAPE, input_tokens=200), None, INFO, "x")
    for request in requests:
        assert isinstance(request.prompt, TokenPrompt)
        assert len(request.prompt.token_ids) == 200
        assert set(request.prompt.token_ids) <= set(range(100))
