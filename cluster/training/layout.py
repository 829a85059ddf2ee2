"""A trained draft in the layout that vLLM loads: config.json of a `Qwen3DSparkModel` and one safetensors file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cluster.training.model import DraftModel, DraftShape


def save_draft(model: DraftModel, folder: Path) -> None:
    """Write the draft in bfloat16, without embedding and head: vLLM lends it the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(model.shape), indent=2) + "\n", encoding="utf-8")


def _config(shape: DraftShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * shape.num_layers,
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "target_layer_ids": list(shape.target_layer_ids),
        "mask_token_id": shape.mask_token_id,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
