"""Gemma 4 targets, their DSpark draft, and their MTP assistant, which reads the target's own keys and values."""

from pathlib import Path

import torch

from tests.checkpoints.dspark import add_dspark_heads, dspark_keys
from tests.checkpoints.folder import Config, Weights, write_checkpoint
from tests.checkpoints.shapes import AUDIBLE, DRAFT_LAYERS, HIDDEN, LOUD, MAX_POSITIONS, QUIET, TARGET_LAYER_IDS
from tests.checkpoints.successor import SuccessorTable, head_rows
from tests.checkpoints.vocabulary import EOS_ID, PAD_ID, VOCAB_SIZE

HEADS = 2
SLIDING_HEAD_DIM, SLIDING_KV_HEADS = 32, 2
FULL_HEAD_DIM, FULL_KV_HEADS = 64, 1
INTERMEDIATE = 64
SLIDING_WINDOW = 32
TARGET_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
DRAFT_LAYER_TYPES = ["full_attention"] * DRAFT_LAYERS  # vLLM's Gemma 4 draft can't have others

ASSISTANT_LAYER_TYPES = ["sliding_attention", "full_attention"]

# Gemma multiplies embeddings by this.
_EMBEDDING_SCALE = HIDDEN**0.5


def write_target(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A text-only Gemma4ForCausalLM that follows `table`, if there is one; only then its head isn't the embedding."""
    config = _config("Gemma4ForCausalLM", TARGET_LAYER_TYPES) | {"tie_word_embeddings": table is None}
    weights = Weights(seed)
    weights.normal("model.embed_tokens.weight", VOCAB_SIZE, HIDDEN, std=1 / _EMBEDDING_SCALE)
    for index, layer_type in enumerate(TARGET_LAYER_TYPES):
        _add_layer(weights, f"model.layers.{index}.", layer_type, gain=LOUD if table is None else QUIET)
    weights.norm("model.norm.weight", HIDDEN)
    if table is not None:
        weights.put("model.embed_tokens.weight", table.codes / _EMBEDDING_SCALE)
        weights.put("lm_head.weight", head_rows(table.codes, table.successor))
    write_checkpoint(folder, config, weights.tensors)


def write_dspark_draft(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A Gemma4DSparkModel, with an embedding and a head of its own."""
    weights = Weights(seed)
    weights.normal("embed_tokens.weight", VOCAB_SIZE, HIDDEN, std=1 / _EMBEDDING_SCALE)
    weights.linear("fc.weight", HIDDEN, HIDDEN * len(TARGET_LAYER_IDS))
    weights.norm("hidden_norm.weight", HIDDEN)
    for index, layer_type in enumerate(DRAFT_LAYER_TYPES):
        _add_layer(weights, f"layers.{index}.", layer_type, gain=LOUD)
    weights.norm("norm.weight", HIDDEN)
    weights.linear("lm_head.weight", VOCAB_SIZE, HIDDEN)
    add_dspark_heads(weights, table)
    write_checkpoint(folder, _config("Gemma4DSparkModel", DRAFT_LAYER_TYPES) | dspark_keys(), weights.tensors)


def write_assistant(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A Gemma4AssistantForCausalLM: queries only, on the last layer of each type of the target. Its input is the
    target's embedding of a token beside the target's last state."""
    text = _config("Gemma4ForCausalLM", ASSISTANT_LAYER_TYPES)
    text |= {"num_kv_shared_layers": len(ASSISTANT_LAYER_TYPES), "vocab_size_per_layer_input": 0}
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "text_config": text | {"tie_word_embeddings": False},
        "backbone_hidden_size": HIDDEN,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    weights = Weights(seed)
    weights.normal("model.embed_tokens.weight", VOCAB_SIZE, HIDDEN, std=1 / _EMBEDDING_SCALE)  # vLLM takes the target's
    weights.linear("pre_projection.weight", HIDDEN, 2 * HIDDEN)
    weights.linear("post_projection.weight", HIDDEN, HIDDEN)
    for index, layer_type in enumerate(ASSISTANT_LAYER_TYPES):
        gain = LOUD if table is None else AUDIBLE
        _add_layer(weights, f"model.layers.{index}.", layer_type, gain=gain, queries_only=True)
    weights.norm("model.norm.weight", HIDDEN)
    weights.linear("lm_head.weight", VOCAB_SIZE, HIDDEN)
    if table is not None:
        weights.put("pre_projection.weight", torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1))
        weights.put("lm_head.weight", head_rows(table.known_codes, table.successor))
    write_checkpoint(folder, config, weights.tensors)


def _config(architecture: str, layer_types: list[str]) -> Config:
    return {
        "architectures": [architecture],
        "model_type": "gemma4_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": HEADS,
        "num_key_value_heads": SLIDING_KV_HEADS,
        "head_dim": SLIDING_HEAD_DIM,
        "num_global_key_value_heads": FULL_KV_HEADS,
        "global_head_dim": FULL_HEAD_DIM,
        "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "sliding_window": SLIDING_WINDOW,
        "layer_types": layer_types,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "attention_bias": False,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
    }


def _add_layer(weights: Weights, prefix: str, layer_type: str, gain: float, *, queries_only: bool = False) -> None:
    full = layer_type == "full_attention"
    head_dim, kv_heads = (FULL_HEAD_DIM, FULL_KV_HEADS) if full else (SLIDING_HEAD_DIM, SLIDING_KV_HEADS)
    weights.norm(f"{prefix}input_layernorm.weight", HIDDEN)
    weights.linear(f"{prefix}self_attn.q_proj.weight", HEADS * head_dim, HIDDEN)
    if not queries_only:
        weights.linear(f"{prefix}self_attn.k_proj.weight", kv_heads * head_dim, HIDDEN)
    if not queries_only and not full:  # a full layer's values are its keys
        weights.linear(f"{prefix}self_attn.v_proj.weight", kv_heads * head_dim, HIDDEN)
    weights.linear(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * head_dim)
    # Gemma 4 doesn't divide scores by the square root of the head size: this norm does.
    weights.norm(f"{prefix}self_attn.q_norm.weight", head_dim, level=head_dim**-0.5)
    if not queries_only:
        weights.norm(f"{prefix}self_attn.k_norm.weight", head_dim)
    weights.norm(f"{prefix}post_attention_layernorm.weight", HIDDEN, level=gain)
    weights.norm(f"{prefix}pre_feedforward_layernorm.weight", HIDDEN)
    weights.linear(f"{prefix}mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
    weights.linear(f"{prefix}mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
    weights.linear(f"{prefix}mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
    weights.norm(f"{prefix}post_feedforward_layernorm.weight", HIDDEN, level=gain)
    weights.norm(f"{prefix}layer_scalar", 1, level=0.9)
