"""A Llama model in GGUF, written out as a Hugging Face folder: weights, configuration and tokenizer.

It is made for the one file whose hash `demo_target` pins, so nothing here checks again what that file says of itself.
transformers' own GGUF route won't do: it keeps quantised weights packed, and gives the tokenizer GPT-2's rules.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: matched as a whole, never split, hidden by skip_special_tokens


def convert_gguf(source: Path, folder: Path) -> Counter[str]:
    """Write the model in `source` into the existing `folder`.

    Leaves model.safetensors, config.json, generation_config.json, tokenizer.json and tokenizer_config.json, and
    returns how many tensors the source holds of each type, such as {"Q4_1": 210, "F32": 61}.
    """
    reader = GGUFReader(source)
    write_weights(reader, folder)
    write_config(reader, folder)
    write_tokenizer(reader, folder)
    return Counter(tensor.tensor_type.name for tensor in reader.tensors)


def write_weights(reader: GGUFReader, folder: Path) -> None:
    """Dequantise every tensor to bfloat16 under its Hugging Face name.

    bfloat16 is what the model was published in and what a GPU runs. It halves the file (269 MB against 538 MB), and
    its rounding, at most 0.4 % of a weight, is small beside the 4-bit steps that are already there. An engine that
    runs in float32 widens it without loss.
    """
    heads = {"attn_q": _field(reader, "llama.attention.head_count"), "attn_k": _kv_heads(reader)}
    weights = {}
    for tensor in reader.tensors:
        *block, module, _ = tensor.name.split(".")  # blk.3.attn_q.weight, or output_norm.weight
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if module in heads:
            weight = unpermute(weight, heads[module])
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{_MODULES[module]}.weight"] = weight
    # Not save_file: its file can be read by its owner alone, and a cache may be shared.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * D, H] of a q or k projection, from llama.cpp's order back to Hugging Face's.

    llama.cpp rotates neighbouring rows of a head together, Hugging Face rows D/2 apart; so llama.cpp's converter
    interleaves the two halves of each head (`LlamaModel.permute` in its convert_hf_to_gguf.py), and this undoes it.
    """
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def write_config(reader: GGUFReader, folder: Path) -> None:
    """Write config.json, and a generation_config.json that sets the special tokens but no sampling."""
    special_ids = {
        f"{short}_token_id": _field(reader, f"tokenizer.ggml.{long}_token_id")
        for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _kv_heads(reader),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # GGUF has a float32; seven digits give back the 1e-05 that it was made from.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output.weight
        **special_ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids)


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    GGUF names the pre-tokenizer ("smollm") but doesn't describe it. The rule is the published tokenizer's: each digit
    on its own, then GPT-2's byte-level split. There is no unknown token, as published: encoding drops the 21 bytes
    that have no token (six control characters, the unassigned planes 4 to 11, and what UTF-8 never uses).
    """
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        # Not GPT2Tokenizer: transformers 5 builds that one's pre-tokenizer itself, without the digits rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        **{
            f"{short}_token": tokens[_field(reader, f"tokenizer.ggml.{long}_token_id")]
            for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        },
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", config)


def _kv_heads(reader: GGUFReader) -> int:
    heads: int = _field(reader, "llama.attention.head_count_kv")
    return heads


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
