"""A target and its draft as configs alone: vLLM's `load_format="dummy"` fills them with random weights.

For time and memory, which don't depend on the weights: how many drafts are accepted is a setting, too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.draft import plan_speculation
from cluster.models.folder import ModelFolder, open_model

NUM_SPECULATIVE_TOKENS: Final = 7

Shape = Literal["qwen3-8b", "gemma4-12b"]

# Qwen/Qwen3-8B.
_QWEN3_8B: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Gemma 4 12B: vocabulary, KV heads, window, and keys that are values in full layers, are what vLLM's issues tell of it;
# layers, hidden and intermediate size are Gemma 3 12B's, which make 12 billion weights.
_GEMMA4_12B: Final = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 1,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _dspark(
    target: dict[str, Any], architecture: str, *, target_layer_ids: list[int], mask_token_id: int
) -> dict[str, Any]:
    """A draft of five of the target's layers that reads as many of its states."""
    return target | {
        "architectures": [architecture],
        "num_hidden_layers": len(target_layer_ids),
        "layer_types": ["full_attention"] * len(target_layer_ids),
        "block_size": NUM_SPECULATIVE_TOKENS,
        "num_target_layers": target["num_hidden_layers"],
        "target_layer_ids": target_layer_ids,
        "mask_token_id": mask_token_id,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "tie_word_embeddings": False,
    }


_PAIRS: Final[dict[Shape, tuple[dict[str, Any], dict[str, Any]]]] = {
    "qwen3-8b": (
        _QWEN3_8B,
        _dspark(_QWEN3_8B, "Qwen3DSparkModel", target_layer_ids=[1, 9, 17, 25, 33], mask_token_id=151669),
    ),
    "gemma4-12b": (
        _GEMMA4_12B,
        _dspark(_GEMMA4_12B, "Gemma4DSparkModel", target_layer_ids=[1, 12, 23, 34, 45], mask_token_id=4),
    ),
}

_LOGIT_BYTES: Final = 4
"""vLLM samples from float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DummySettings(EngineSettings):
    """As its base, without a tokenizer: token ids go in and come out."""

    def to_engine_args(self) -> dict[str, Any]:
        return EngineSettings.to_engine_args(self) | {"skip_tokenizer_init": True}


def dummy_settings(
    folder: Path, *, shape: Shape, with_draft: bool, acceptance_length: float, **sizes: Any
) -> DummySettings:
    """Write the configs under `folder`; `sizes` are those of EngineOptions."""
    of_target, of_draft = _PAIRS[shape]
    target = _write(folder / "target", of_target, role="target")
    speculation = plan_speculation(target, _write(folder / "draft", of_draft, role="draft"), None)
    return DummySettings(
        target=target,
        speculation=speculation if with_draft else None,
        load_format="dummy",
        synthetic_acceptance_length=acceptance_length,
        **sizes,
    )


def parse_shape(word: str, flag: str) -> Shape:
    """Raises UserError for another word."""
    shapes: tuple[Shape, ...] = get_args(Shape)
    for shape in shapes:
        if word == shape:
            return shape
    raise UserError(flag, "there is no such shape", f"choose one of {', '.join(shapes)}")


def write_pair(folder: Path, shape: Shape) -> tuple[Path, Path]:
    """The folders of a target and its draft that can be served: the target has a tokenizer, of numbered words."""
    of_target, of_draft = _PAIRS[shape]
    target, draft = (folder / role for role in ("target", "draft"))
    folder.mkdir(parents=True, exist_ok=True)
    _write(target, of_target, role="target")
    _write(draft, of_draft, role="draft")
    _write_tokenizer(target, of_target["vocab_size"])
    return target, draft


def logits_bytes(shape: Shape, batch: int) -> tuple[int, int]:
    """Of a round's logits, the target's [B (K + 1), V] and the draft's [B K, V]."""
    row = batch * _PAIRS[shape][0]["vocab_size"] * _LOGIT_BYTES
    return row * (NUM_SPECULATIVE_TOKENS + 1), row * NUM_SPECULATIVE_TOKENS


def _write(folder: Path, config: dict[str, Any], *, role: str) -> ModelFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_model(str(folder), role=role, weights=False)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0", eos_token="0").save_pretrained(folder)
