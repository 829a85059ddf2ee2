"""Whether a converted model is right: rows of a tiny one, then weights and tokenizer of the real demo target.

The real model is converted once and stays in the cache that DSPARK_CACHE names.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.models.demo_target import demo_target
from cluster.models.gguf import convert_gguf
from tests.unit.tiny_gguf import write_tiny_gguf


def test_transformers_loads_every_weight_and_finds_q_and_k_in_its_own_row_order(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path) == {"F32": 11}
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    attention = model.model.layers[0].self_attn
    # llama.cpp's order has the halves of each head interleaved: its rows 0, 2 are the first half, 1, 3 the second.
    assert attention.q_proj.weight[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert attention.k_proj.weight[:, 0].tolist() == [0, 2, 1, 3]
    assert attention.v_proj.weight[:, 0].tolist() == [0, 1, 2, 3]
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == 1e-5


@pytest.fixture(scope="session")
def real_folder() -> Path:
    return demo_target(progress=print)


@pytest.fixture(scope="session")
def tokenizer(real_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(real_folder)


def test_a_greedy_answer_in_float32_is_right_and_ends_by_itself(real_folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(real_folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = output[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_chat_template_renders_roles_and_a_default_system_prompt(tokenizer: Any) -> None:
    def render(*messages: tuple[str, str]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return text

    assert render(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(("user", "Hi")).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_each_digit_is_a_token_and_the_blanks_before_it_stay_together(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    # What the digits rule decides: GPT-2's split alone would give the last blank to the digit, and so "Ġ", "Ġ", "1".
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_special_tokens_have_their_ids_and_are_hidden_on_request(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]
    assert tokenizer.encode("<empty_output>") == [16]
    assert tokenizer.decode([1, *tokenizer.encode("user"), 2], skip_special_tokens=True) == "user"
    assert len(tokenizer) == 49152


@pytest.mark.parametrize(
    "text",
    [
        "",
        " two  blanks ,  and before punctuation .",
        "naïve Ærøskøbing, Привет, 你好，世界, שלום, 👩🏽‍🚀 e\u0301",
        "def f(x: int) -> int:\n\treturn x ** 2  # 3.14\r\n",
        "1234567890 0x1F ½ ٣ ²",
    ],
)
def test_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Without surrogates and unassigned characters, and without the six control characters that have no token (see
# write_tokenizer), as in the published tokenizer.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\x04\x06\x13\x14\x16\x1d"))


@given(text=TEXT)
def test_any_text_survives_encoding_and_decoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
