"""The tiny checkpoints are what they claim, as far as that shows without an engine."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from tests.checkpoints import CONFIG_ONLY_PAIRS, PAIRS, TinyPair, make_pair, memoryless
from tests.checkpoints.qwen3 import HEAD_DIM
from tests.checkpoints.shapes import HIDDEN, TARGET_LAYER_IDS, K
from tests.checkpoints.successor import SuccessorTable, successor_table
from tests.checkpoints.vocabulary import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, printable_ids

AGREEING = [name for name in PAIRS if name.endswith("-agreeing")]
DSPARK = [name for name in PAIRS if "dspark" in name]
EAGLE3 = [name for name in PAIRS if "eagle3" in name]
PERIODS = [None, 9]
SEED = 0

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_pair(name, folder / name, seed=SEED) for name in PAIRS + CONFIG_ONLY_PAIRS}


@pytest.fixture
def tiny_target(pairs: dict[str, TinyPair]) -> Path:
    return pairs["qwen3-dspark"].target


def table_of(pair: TinyPair) -> SuccessorTable:
    return successor_table(SEED, 9 if pair.method == "dflash" else None)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def stored_shapes(folder: Path) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def built_shapes(folder: Path) -> Shapes:
    """What transformers builds from a folder's config, less what is tied to something else."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


@torch.inference_mode()
def next_tokens(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The greedy next token after every prefix of `tokens`, int64[B, T]."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model(tokens).logits.argmax(-1)


def printable_text(rows: int, columns: int) -> torch.Tensor:
    printable = torch.tensor(printable_ids())
    return printable[torch.randint(len(printable), (rows, columns), generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("name", PAIRS + CONFIG_ONLY_PAIRS)
def test_same_seed_gives_the_same_bytes(name: str, pairs: dict[str, TinyPair], tmp_path: Path) -> None:
    again = make_pair(name, tmp_path, seed=SEED)
    assert files(again.target) == files(pairs[name].target)
    assert files(again.draft) == files(pairs[name].draft)


@pytest.mark.parametrize("name", PAIRS)
def test_other_seed_gives_other_weights(name: str, pairs: dict[str, TinyPair], tmp_path: Path) -> None:
    other = make_pair(name, tmp_path, seed=SEED + 1)
    for mine, theirs in ((pairs[name].target, other.target), (pairs[name].draft, other.draft)):
        assert (mine / "model.safetensors").read_bytes() != (theirs / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", PAIRS)
def test_every_folder_is_below_one_megabyte(name: str, pairs: dict[str, TinyPair]) -> None:
    for folder in (pairs[name].target, pairs[name].draft):
        assert sum(len(content) for content in files(folder).values()) < 1_000_000


def test_an_unknown_pair_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen3-dspark, gemma4-dspark"):
        make_pair("qwen4", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "Hello, world!", "  two  spaces\n\ttab", "naïve 你好 🙂", "def f(x):\n    return x[1:]"]
)
def test_tokenizer_returns_any_text(text: str, tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {*ids} & {*range(len(SPECIAL_TOKENS))}


def test_tokenizer_fills_the_vocabulary_and_merges(tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.eos_token_id == EOS_ID
    assert len(tokenizer.encode("the tea")) < len("the tea")


def test_chat_template_renders_and_encodes(tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", PAIRS)
def test_target_has_the_tensors_of_its_architecture(name: str, pairs: dict[str, TinyPair]) -> None:
    assert stored_shapes(pairs[name].target) == built_shapes(pairs[name].target)


@pytest.mark.parametrize("name", ["qwen3-draft-model", "qwen3-draft-model-agreeing"])
def test_standalone_draft_has_the_tensors_of_its_architecture(name: str, pairs: dict[str, TinyPair]) -> None:
    assert stored_shapes(pairs[name].draft) == built_shapes(pairs[name].draft)


@pytest.mark.parametrize("name", [name for name in PAIRS if "dspark" in name or "dflash" in name])
def test_block_draft_has_layers_of_its_family_and_a_projection_of_the_targets_states(
    name: str, pairs: dict[str, TinyPair]
) -> None:
    stored = stored_shapes(pairs[name].draft)
    layers = {key: shape for key, shape in stored.items() if key.startswith("layers.")}
    built = {key.removeprefix("model."): shape for key, shape in built_shapes(pairs[name].draft).items()}
    assert layers == {key: shape for key, shape in built.items() if key.startswith("layers.")}
    assert stored["fc.weight"] == (HIDDEN, HIDDEN * len(TARGET_LAYER_IDS))
    assert stored["hidden_norm.weight"] == stored["norm.weight"] == (HIDDEN,)
    assert config_of(pairs[name].draft)["num_target_layers"] == config_of(pairs[name].target)["num_hidden_layers"]


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_draft_has_a_vocabulary_of_printable_tokens(name: str, pairs: dict[str, TinyPair]) -> None:
    config, tensors = config_of(pairs[name].draft), load_file(pairs[name].draft / "model.safetensors")
    size = config["draft_vocab_size"]
    assert size < VOCAB_SIZE
    assert tensors["lm_head.weight"].shape == (size, HIDDEN)
    assert (torch.arange(size) + tensors["d2t"]).tolist() == printable_ids()
    assert tensors["t2d"].nonzero().flatten().tolist() == printable_ids()
    # Its one layer reads token and states side by side.
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * HIDDEN
    assert tensors["fc.weight"].shape == (HIDDEN, HIDDEN * len(config["eagle_aux_hidden_state_layer_ids"]))


@pytest.mark.parametrize("name", DSPARK)
def test_dspark_heads_have_the_sizes_of_the_config(name: str, pairs: dict[str, TinyPair]) -> None:
    config, stored = config_of(pairs[name].draft), stored_shapes(pairs[name].draft)
    rank = config["markov_rank"]
    assert stored["markov_head.markov_w1.weight"] == stored["markov_head.markov_w2.weight"] == (VOCAB_SIZE, rank)
    assert stored["confidence_head.proj.weight"] == (1, HIDDEN + rank)
    assert stored["confidence_head.proj.bias"] == (1,)
    assert config["block_size"] == pairs[name].num_speculative_tokens
    # Gemma 4's draft stands alone; Qwen3's borrows both.
    own = name.startswith("gemma4")
    assert ("lm_head.weight" in stored) == ("embed_tokens.weight" in stored) == own


def test_deepseek_v4_config_loads_and_has_every_kind_of_layer(pairs: dict[str, TinyPair]) -> None:
    config = AutoConfig.from_pretrained(pairs["deepseek-v4-dspark"].target)
    assert {*config.layer_types} == {
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    }
    assert config.dspark_block_size == pairs["deepseek-v4-dspark"].num_speculative_tokens


@pytest.mark.parametrize("name", AGREEING)
def test_agreeing_target_follows_its_table(name: str, pairs: dict[str, TinyPair]) -> None:
    text = printable_text(8, 48)
    assert next_tokens(pairs[name].target, text).equal(table_of(pairs[name]).successor[text])


def test_agreeing_standalone_draft_is_wrong_at_blind_tokens_only(pairs: dict[str, TinyPair]) -> None:
    pair = pairs["qwen3-draft-model-agreeing"]
    table, text = table_of(pair), printable_text(8, 48)
    wrong = next_tokens(pair.draft, text) != table.successor[text]
    assert wrong.equal(table.blind[text])


@pytest.mark.parametrize("name", [name for name in AGREEING if name in DSPARK])
def test_agreeing_markov_head_knows_all_but_the_blind_tokens(name: str, pairs: dict[str, TinyPair]) -> None:
    table, tensors = table_of(pairs[name]), load_file(pairs[name].draft / "model.safetensors")
    bias = tensors["markov_head.markov_w1.weight"] @ tensors["markov_head.markov_w2.weight"].T
    assert bias.argmax(-1)[~table.blind].equal(table.successor[~table.blind])
    assert not bias[table.blind].any()


def test_agreeing_eagle3_head_knows_all_but_the_blind_tokens(pairs: dict[str, TinyPair]) -> None:
    pair = pairs["qwen3-eagle3-agreeing"]
    table, own = table_of(pair), torch.tensor(printable_ids())
    logits = table.codes @ load_file(pair.draft / "model.safetensors")["lm_head.weight"].T
    right = own[logits.argmax(-1)] == table.successor
    assert right[~table.blind].all()
    assert not right[table.blind].any()


def test_agreeing_dflash_draft_attends_one_period_back(pairs: dict[str, TinyPair]) -> None:
    pair = pairs["qwen3-dflash-agreeing"]
    period, tensors = table_of(pair).period, load_file(pair.draft / "model.safetensors")
    assert period > K  # otherwise it would have to copy what is being drafted
    positions = torch.arange(400)
    cos, sin = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(pair.draft))(torch.zeros(1), positions[None])
    query, key = (
        tensors[f"layers.0.self_attn.{name}_proj.bias"][:HEAD_DIM].expand(1, 1, len(positions), HEAD_DIM)
        for name in ("q", "k")
    )
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    scores = (query @ key.transpose(-1, -2))[0, 0]
    assert scores.argmax(-1)[period:].equal(positions[:-period])


def test_memoryless_target_has_the_probabilities_of_its_table(tmp_path: Path) -> None:
    target, _ = memoryless.write_pair(tmp_path, SEED)
    text = torch.tensor([memoryless.ALPHABET, memoryless.ALPHABET[::-1]])
    with torch.inference_mode():
        probabilities = AutoModelForCausalLM.from_pretrained(target)(text).logits.double().softmax(-1)
    alphabet = probabilities[..., memoryless.ALPHABET]
    expected = memoryless.next_token_probabilities()
    assert torch.allclose(alphabet[0], expected, atol=1e-5)
    assert torch.allclose(alphabet[1], expected.flip(0), atol=1e-5)


@pytest.mark.parametrize("period", PERIODS)
def test_table_has_cycles_of_printable_tokens_into_which_all_others_lead(period: int | None) -> None:
    table, printable = successor_table(SEED, period), printable_ids()
    assert {*table.successor.tolist()} <= {*printable}
    in_cycles = table.successor.unique()
    assert len(in_cycles) == len(printable) // table.period * table.period
    token = in_cycles
    for step in range(table.period):
        assert step == 0 or not (token == in_cycles).any()
        token = table.successor[token]
    assert token.equal(in_cycles)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("period", PERIODS)
def test_rounds_of_every_length_occur(seed: int, period: int | None) -> None:
    """Over a few requests of 40 tokens, whose draft is right up to a blind token."""
    table = successor_table(seed, period)
    lengths = [length for start in range(0, VOCAB_SIZE, 32) for length in accepted_lengths(table, start, tokens=40)]
    assert {*lengths} == {*range(K + 1)}


def accepted_lengths(table: SuccessorTable, last: int, tokens: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) + len(lengths) < tokens:
        chain = [*accumulate(range(K + 1), lambda token, _: int(table.successor[token]), initial=last)]
        known = [not table.blind[token] for token in chain[:K]]
        lengths.append((*known, False).index(False))
        last = chain[lengths[-1] + 1]
    return lengths
