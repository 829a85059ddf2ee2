"""EAGLE-3 drafts for Qwen3 targets, in the layout of most public ones: one Llama layer and a vocabulary of its own."""

from pathlib import Path

import torch

from tests.checkpoints.folder import Config, Weights, write_checkpoint
from tests.checkpoints.shapes import AUDIBLE, HIDDEN, LOUD, MAX_POSITIONS
from tests.checkpoints.successor import SuccessorTable, head_rows
from tests.checkpoints.vocabulary import EOS_ID, PAD_ID, VOCAB_SIZE, printable_ids

HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 64
AUX_LAYER_IDS = [1, 2, 3]  # EAGLE-3 counts the states that enter a layer, not those that leave it

# Query and key of a token are its code times this: a position finds itself, or another with the same token.
_CODE_SHARPNESS = 3.0


def write_draft(folder: Path, seed: int, table: SuccessorTable | None) -> None:
    """A LlamaForCausalLMEagle3 that drafts printable tokens only, and borrows the target's embedding.

    It reads the last token beside the target's states. In an agreeing one attention brings the token's code to the
    head, which knows a part of `table`.
    """
    weights = Weights(seed)
    fused = HIDDEN * len(AUX_LAYER_IDS)
    weights.norm("input_norm.weight", fused)
    for index in range(len(AUX_LAYER_IDS)):
        weights.norm(f"fc_norm.{index}.weight", HIDDEN)
    weights.linear("fc.weight", HIDDEN, fused)
    _add_layer(weights, "midlayer.", gain=LOUD if table is None else AUDIBLE)
    weights.norm("norm.weight", HIDDEN)
    own = torch.tensor(printable_ids())
    weights.linear("lm_head.weight", len(own), HIDDEN)
    weights.put("d2t", own - torch.arange(len(own)))
    weights.put("t2d", torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, own, True))
    if table is not None:
        _read_the_last_token(weights, "midlayer.")
        weights.put("lm_head.weight", head_rows(table.known_codes, table.successor)[own])
    write_checkpoint(folder, _config(draft_vocab_size=len(own)), weights.tensors)


def _config(draft_vocab_size: int) -> Config:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYER_IDS,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
    }


def _add_layer(weights: Weights, prefix: str, gain: float) -> None:
    weights.norm(f"{prefix}hidden_norm.weight", HIDDEN)
    weights.norm(f"{prefix}input_layernorm.weight", HIDDEN)
    weights.linear(f"{prefix}self_attn.q_proj.weight", HEADS * HEAD_DIM, 2 * HIDDEN)
    weights.linear(f"{prefix}self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, 2 * HIDDEN)
    weights.linear(f"{prefix}self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, 2 * HIDDEN)
    weights.linear(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, gain)
    weights.norm(f"{prefix}post_attention_layernorm.weight", HIDDEN)
    weights.linear(f"{prefix}mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
    weights.linear(f"{prefix}mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
    weights.linear(f"{prefix}mlp.down_proj.weight", HIDDEN, INTERMEDIATE, gain)


def _read_the_last_token(weights: Weights, prefix: str) -> None:
    """Make half of the heads find their position's token, and bring its code out. The others see all of the context."""
    weights.norm(f"{prefix}hidden_norm.weight", HIDDEN, level=AUDIBLE)
    code = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)  # of (token, states)
    weights.put(f"{prefix}self_attn.k_proj.weight", _CODE_SHARPNESS * code)
    weights.put(f"{prefix}self_attn.v_proj.weight", code)
    query = weights.tensors[f"{prefix}self_attn.q_proj.weight"].view(KV_HEADS, -1, HEAD_DIM, 2 * HIDDEN)
    output = weights.tensors[f"{prefix}self_attn.o_proj.weight"].view(HIDDEN, KV_HEADS, -1, HEAD_DIM)
    query[:, 0] = _CODE_SHARPNESS * code.view(KV_HEADS, HEAD_DIM, 2 * HIDDEN)
    output[:, :, 0] = torch.eye(HIDDEN).view(HIDDEN, KV_HEADS, HEAD_DIM)
