"""Qwen3 targets, and their DSpark, DFlash and standalone drafts."""

from pathlib import Path

import torch

from tests.checkpoints.dspark import add_dspark_heads, dspark_keys
from tests.checkpoints.folder import Config, Weights, write_checkpoint
from tests.checkpoints.shapes import (
    AUDIBLE,
    DRAFT_LAYERS,
    HIDDEN,
    LOUD,
    MAX_POSITIONS,
    QUIET,
    TARGET_LAYER_IDS,
    TARGET_LAYERS,
    K,
)
from tests.checkpoints.successor import SuccessorTable, head_rows
from tests.checkpoints.vocabulary import EOS_ID, MASK_ID, PAD_ID, VOCAB_SIZE

HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # the smallest of vLLM's CPU attention
INTERMEDIATE = 64
ROPE_THETA = 10000.0

# A copying head's scores fall by 15 from the right position to its neighbours.
_COPY_SHARPNESS = 8.0
# What is copied, relative to the embedding of the mask to which it is added.
_COPY_GAIN = 4.0

SLIDING_WINDOW = 24


def write_target(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A Qwen3ForCausalLM that follows `table`, if there is one."""
    weights = _causal_lm(seed, TARGET_LAYERS, table, QUIET)
    if table is not None:
        weights.put("lm_head.weight", head_rows(table.codes, table.successor))
    write_checkpoint(folder, _config("Qwen3ForCausalLM", TARGET_LAYERS), weights.tensors)


def write_standalone_draft(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A smaller Qwen3ForCausalLM, for `draft_model`, that follows the part of `table` it knows."""
    weights = _causal_lm(seed, DRAFT_LAYERS, table, AUDIBLE)
    if table is not None:
        weights.put("lm_head.weight", head_rows(table.known_codes, table.successor))
    write_checkpoint(folder, _config("Qwen3ForCausalLM", DRAFT_LAYERS), weights.tensors)


def write_dspark_draft(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A Qwen3DSparkModel without embedding and head: vLLM lends it the target's."""
    weights = Weights(seed)
    _add_draft_backbone(weights, gain=LOUD)
    add_dspark_heads(weights, table)
    write_checkpoint(folder, _config("Qwen3DSparkModel", DRAFT_LAYERS) | dspark_keys(), weights.tensors)


def write_hybrid_dflash_draft(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A DFlashDraftModel of which every second layer has a sliding window."""
    kinds = ["full_attention", "sliding_attention"]
    _write_dflash_draft(folder, seed, table, [kinds[index % 2] for index in range(DRAFT_LAYERS)])


def write_dflash_draft(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A DFlashDraftModel."""
    _write_dflash_draft(folder, seed, table, ["full_attention"] * DRAFT_LAYERS)


def _write_dflash_draft(folder: Path, seed: int, table: SuccessorTable | None, layer_types: list[str]) -> None:
    """Its masks are filled in parallel, so it can't follow a table token by token. But a table of short cycles makes
    the target's text periodic: this draft proposes what stood one period before, where it knows that token.
    """
    dflash = {"mask_token_id": MASK_ID, "target_layer_ids": TARGET_LAYER_IDS, "swa_window_size": SLIDING_WINDOW}
    config = _config("DFlashDraftModel", DRAFT_LAYERS) | {
        "block_size": K + 1,  # DFlash counts the token that the masks follow
        "num_target_layers": TARGET_LAYERS,
        "layer_types": layer_types,
        "dflash_config": dflash,
    }
    weights = Weights(seed)
    if table is None:
        _add_draft_backbone(weights, gain=1.0)
    else:
        config["attention_bias"] = True  # lets a head attend by position alone
        _add_draft_backbone(weights, gain=QUIET)
        _copy_from_context(weights, table.period)
        weights.put("lm_head.weight", head_rows(table.known_codes, torch.arange(VOCAB_SIZE)))
    write_checkpoint(folder, config, weights.tensors)


def _config(architecture: str, layers: int) -> Config:
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
    }


def _causal_lm(seed: int, layers: int, table: SuccessorTable | None, gain: float) -> Weights:
    """`gain` is that of the layers of a model that follows `table`."""
    weights = Weights(seed)
    weights.normal("model.embed_tokens.weight", VOCAB_SIZE, HIDDEN)
    if table is not None:
        weights.put("model.embed_tokens.weight", table.codes)
    for index in range(layers):
        _add_layer(weights, f"model.layers.{index}.", 1.0 if table is None else gain)
    weights.norm("model.norm.weight", HIDDEN)
    weights.linear("lm_head.weight", VOCAB_SIZE, HIDDEN)
    return weights


def _add_draft_backbone(weights: Weights, gain: float) -> None:
    """What DSpark and DFlash drafts share."""
    weights.linear("fc.weight", HIDDEN, HIDDEN * len(TARGET_LAYER_IDS))
    weights.norm("hidden_norm.weight", HIDDEN)
    for index in range(DRAFT_LAYERS):
        _add_layer(weights, f"layers.{index}.", gain)
    weights.norm("norm.weight", HIDDEN)


def _add_layer(weights: Weights, prefix: str, gain: float) -> None:
    weights.norm(f"{prefix}input_layernorm.weight", HIDDEN)
    weights.linear(f"{prefix}self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN)
    weights.linear(f"{prefix}self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
    weights.linear(f"{prefix}self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
    weights.linear(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, gain)
    weights.norm(f"{prefix}self_attn.q_norm.weight", HEAD_DIM)
    weights.norm(f"{prefix}self_attn.k_norm.weight", HEAD_DIM)
    weights.norm(f"{prefix}post_attention_layernorm.weight", HIDDEN)
    weights.linear(f"{prefix}mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
    weights.linear(f"{prefix}mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
    weights.linear(f"{prefix}mlp.down_proj.weight", HIDDEN, INTERMEDIATE, gain)


def _copy_from_context(weights: Weights, distance: int) -> None:
    """Make the first layer add the target's state of the token `distance` positions back."""
    for index in range(DRAFT_LAYERS):
        for projection, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights.put(f"layers.{index}.self_attn.{projection}_proj.bias", torch.zeros(size * HEAD_DIM))
        weights.put(f"layers.{index}.self_attn.o_proj.bias", torch.zeros(HIDDEN))
    _attend_at_distance(weights, "layers.0.self_attn.", distance)
    # The states pass unchanged: the mean of the target's layers, a half of it in each KV head, then put together again.
    weights.put("fc.weight", torch.eye(HIDDEN).repeat(1, len(TARGET_LAYER_IDS)))
    weights.put("layers.0.self_attn.v_proj.weight", torch.eye(HIDDEN))
    halves = torch.eye(HIDDEN).view(HIDDEN, KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, dim=1)
    weights.put("layers.0.self_attn.o_proj.weight", _COPY_GAIN * KV_HEADS / HEADS * halves.flatten(1))


def _attend_at_distance(weights: Weights, attention: str, distance: int) -> None:
    """Make query and key constants, so that RoPE alone decides.

    Both lie on the first axis of every rotated pair, the query turned back by `distance` positions: their product peaks
    where they are that far apart.
    """
    angles = distance * ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    query = torch.cat([angles.cos(), -angles.sin()])
    key = torch.cat([torch.ones_like(angles), torch.zeros_like(angles)])
    for name, heads, vector in (("q", HEADS, query), ("k", KV_HEADS, key)):
        weights.put(f"{attention}{name}_proj.weight", torch.zeros(heads * HEAD_DIM, HIDDEN))
        weights.put(f"{attention}{name}_proj.bias", vector.repeat(heads))
        weights.put(f"{attention}{name}_norm.weight", torch.full((HEAD_DIM,), _COPY_SHARPNESS))
