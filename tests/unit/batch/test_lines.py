"""What is wrong with an input is said with its line, before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from cluster.batch.check import check_input
from cluster.batch.lines import read_input
from cluster.client import ChatMessage, ChatPrompt, DraftInfo, ModelInfo, Sampling, Stopping, TextPrompt, TokenPrompt
from cluster.errors import UserError
from tests.unit.batch.conftest import WriteInput

INFO = ModelInfo(
    model="scripted",
    vocab_size=512,
    max_model_len=256,
    has_chat_template=False,
    default_sampling=Sampling(n=1, temperature=0.0, top_p=0.9),
    draft=DraftInfo(model="draft", method="dspark", num_speculative_tokens=4),
    limits={"max_n": 4, "max_logprobs": 20, "max_stop_strings": 2, "max_message_bytes": 4096, "max_running": 4},
    unimplemented_fields=("sampling.min_p", "sampling.logit_bias", "priority"),
    vllm_version="0.32.0",
)


def test_a_line_is_a_request(write_input: WriteInput) -> None:
    batch = write_input(
        {"prompt": "Hello", "temperature": 1, "stop_strings": ["."], "id": "first"},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "speculation": {"max_tokens": 2}},
        {"token_ids": [1, 2], "logprobs": 3, "structured_output": {"kind": "regex", "text": "a+"}},
        defaults={"max_tokens": 9},
    )
    text, chat, tokens = (line.request for line in batch.lines)
    assert [(line.index, line.id) for line in batch.lines] == [(0, "first"), (2, None), (3, None)]
    assert text.prompt == TextPrompt(text="Hello")
    assert (text.sampling.temperature, text.stopping) == (1.0, Stopping(max_tokens=9, stop_strings=(".",)))
    assert chat.prompt == ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
    assert (chat.stopping.max_tokens, chat.speculation.max_tokens) == (5, 2)
    assert tokens.prompt == TokenPrompt(token_ids=(1, 2))
    assert (tokens.output.logprobs, tokens.structured_output.text) == (3, "a+")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list: it must be a JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "prompt is given twice"),
        ({}, "is a line without a prompt: it must be one with prompt, messages or token_ids"),
        ({"prompt": "a", "token_ids": [1]}, "is a line with prompt and token_ids"),
        ({"prompt": "a", "temprature": 1}, "temprature: there is no such key; did you mean temperature?"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens is 1.5: it must be an integer"),
        ({"prompt": "a", "max_tokens": -1}, "is not a request (Value out of range: -1)"),
        ({"prompt": "a", "top_k": 1 << 70}, "is not a request (Value out of range"),
        ({"prompt": "\ud800"}, "is not a request"),
        ({"prompt": "a", "id": 7}, "id is 7: it must be a string"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt is given without messages"),
        ({"messages": [{"role": "me", "content": ""}]}, "messages[0].role is 'me': it must be one of 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: it is missing"),
        ({"prompt": "b", "id": "x"}, "id 'x': "),
    ],
)
def test_what_is_no_request_is_said_with_its_line(write_input: WriteInput, line: Any, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        write_input({"prompt": "a", "id": "x"}, line)
    assert "prompts.jsonl, line 2" in str(refusal.value)
    assert said in str(refusal.value)


def test_an_input_that_is_none(write_input: WriteInput, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no request in it"):
        write_input("", " ")
    with pytest.raises(UserError, match="it can't be read"):
        read_input(tmp_path / "absent.jsonl", {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": ""}, "prompt.text: it is empty"),
        ({"prompt": "a", "top_p": 3}, "sampling.top_p: 3 is not in its range"),
        ({"prompt": "a", "temperature": float("nan")}, "sampling.temperature: nan is not in its range"),
        ({"prompt": "a", "n": 5, "temperature": 1}, "sampling.n: 5 is not in its range: 1 to 4"),
        ({"prompt": "a", "logprobs": 21}, "output.logprobs: 21; at most 20"),
        ({"prompt": "a", "stop_strings": ["a", "b", "c"]}, "stopping.stop_strings: 3 of them; at most 2"),
        ({"prompt": "a", "min_p": 0.5}, "sampling.min_p: vLLM 0.32 can't combine it"),
        ({"prompt": "a", "priority": 1}, "priority: this engine schedules first come"),
        ({"token_ids": [1, 600]}, "prompt.token_ids.ids[1]: 600; the vocabulary has 512"),
        ({"token_ids": [1] * 300}, "prompt: 300 tokens; the context holds 256"),
        ({"token_ids": [1] * 200, "max_tokens": 57}, "stopping.max_tokens: 57; the context holds 256"),
        ({"prompt": "long" * 1024}, "bytes; a request may have 4,096"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "scripted has no chat template"),
    ],
)
def test_what_the_server_would_refuse_is_said_before_it_is_sent(write_input: WriteInput, line: Any, said: str) -> None:
    batch = write_input({"token_ids": [1] * 300, "truncate_prompt_tokens": 9}, line)
    with pytest.raises(UserError) as refusal:
        check_input(batch, INFO)
    assert "prompts.jsonl, line 2: " in str(refusal.value)
    assert said in str(refusal.value)
