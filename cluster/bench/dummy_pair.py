"""A target and its draft as configs alone: vLLM's `load_format="dummy"` fills them with random weights.

For time and memory, which don't depend on the weights: how many drafts are accepted is a setting, too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.draft import DEFAULT_STANDALONE_TOKENS, plan_speculation
from cluster.models.folder import ModelFolder, open_model

Shape = Literal["qwen3-8b", "gemma4-12b", "gemma4-12b-mtp"]

_BLOCK_SIZE: Final = 7
"""Of the DSpark drafts."""

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
        "block_size": _BLOCK_SIZE,
        "num_target_layers": target["num_hidden_layers"],
        "target_layer_ids": target_layer_ids,
        "mask_token_id": mask_token_id,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "tie_word_embeddings": False,
    }


def _assistant(target: dict[str, Any]) -> dict[str, Any]:
    """Queries only, on the target's last sliding and last full layer, whose heads of keys and values it has, too. Four
    layers are what Gemma 4's assistants have; hidden and intermediate size are assumed."""
    text = target | {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_kv_shared_layers": 4,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "tie_word_embeddings": False,
        "torch_dtype": target["torch_dtype"],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two configs, and tokens a round: drafted, and on average accepted with the target's own."""

    target: dict[str, Any]
    draft: dict[str, Any]
    num_speculative_tokens: int
    acceptance_length: float


_PAIRS: Final[dict[Shape, _Pair]] = {
    "qwen3-8b": _Pair(
        target=_QWEN3_8B,
        draft=_dspark(_QWEN3_8B, "Qwen3DSparkModel", target_layer_ids=[1, 9, 17, 25, 33], mask_token_id=151669),
        num_speculative_tokens=_BLOCK_SIZE,
        acceptance_length=5.5,
    ),
    "gemma4-12b": _Pair(
        target=_GEMMA4_12B,
        draft=_dspark(_GEMMA4_12B, "Gemma4DSparkModel", target_layer_ids=[1, 12, 23, 34, 45], mask_token_id=4),
        num_speculative_tokens=_BLOCK_SIZE,
        acceptance_length=5.5,
    ),
    "gemma4-12b-mtp": _Pair(
        target=_GEMMA4_12B,
        draft=_assistant(_GEMMA4_12B),
        num_speculative_tokens=DEFAULT_STANDALONE_TOKENS,
        acceptance_length=3.0,
    ),
}

_LOGIT_BYTES: Final = 4
"""vLLM samples from float32."""


_VLLM_CAPTURES_UP_TO: Final = 512
"""Tokens: with 7 drafted, rounds of more than 64 requests would have no CUDA graph, and the CPU be what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DummySettings(EngineSettings):
    """As its base, without a tokenizer: token ids go in and come out.

    `attention_backend`: target's and draft's, by vLLM's name; None is vLLM's choice.
    """

    attention_backend: str | None = None

    def to_engine_args(self) -> dict[str, Any]:
        arguments = EngineSettings.to_engine_args(self)
        if self.attention_backend is not None:
            arguments["attention_config"] = {"backend": self.attention_backend}
            if self.speculation is not None:  # or vLLM selects again for the draft
                arguments["speculative_config"]["attention_backend"] = self.attention_backend
        if self.speculation is not None:
            tokens = self.max_num_seqs * (self.speculation.num_speculative_tokens + 1)
            if tokens > _VLLM_CAPTURES_UP_TO:
                arguments.setdefault("compilation_config", {})["max_cudagraph_capture_size"] = tokens
        return arguments | {"skip_tokenizer_init": True}


def dummy_settings(
    folder: Path,
    *,
    shape: Shape,
    with_draft: bool,
    acceptance_length: float,
    attention_backend: str | None = None,
    **sizes: Any,
) -> DummySettings:
    """Write the configs under `folder`; `sizes` are those of EngineOptions."""
    pair = _PAIRS[shape]
    target = _write(folder / "target", pair.target, role="target")
    draft = _write(folder / "draft", pair.draft, role="draft")
    return DummySettings(
        target=target,
        speculation=plan_speculation(target, draft, pair.num_speculative_tokens) if with_draft else None,
        load_format="dummy",
        synthetic_acceptance_length=acceptance_length,
        attention_backend=attention_backend,
        **sizes,
    )


def acceptance_length_of(shape: Shape, wanted: float | None) -> float:
    """Tokens a round on average, the target's own included; None is the shape's own.

    Raises UserError for more than the draft proposes.
    """
    pair = _PAIRS[shape]
    most = pair.num_speculative_tokens + 1
    if wanted is not None and wanted > most:
        raise UserError(f"--acceptance-length {wanted:g}", f"{shape} makes {most} tokens a round at most", "take less")
    return pair.acceptance_length if wanted is None else wanted


def parse_shape(word: str, flag: str) -> Shape:
    """Raises UserError for another word."""
    shapes: tuple[Shape, ...] = get_args(Shape)
    for shape in shapes:
        if word == shape:
            return shape
    raise UserError(flag, "there is no such shape", f"choose one of {', '.join(shapes)}")


def write_pair(folder: Path, shape: Shape) -> tuple[Path, Path]:
    """The folders, in this one, of a target and its draft that can be served: the target has a tokenizer, of numbered
    words."""
    pair = _PAIRS[shape]
    target, draft = folder / shape, folder / f"{shape}-draft"
    folder.mkdir(parents=True, exist_ok=True)
    _write(target, pair.target, role="target")
    _write(draft, pair.draft, role="draft")
    _write_tokenizer(target, pair.target["vocab_size"])
    return target, draft


def logits_bytes(shape: Shape, batch: int) -> tuple[int, int]:
    """Of a round's logits, the target's [B (K + 1), V] and the draft's: DSpark's [B K, V], an assistant's [B, V], a
    token after the other."""
    pair = _PAIRS[shape]
    row = batch * pair.target["vocab_size"] * _LOGIT_BYTES
    at_once = 1 if "text_config" in pair.draft else pair.num_speculative_tokens
    return row * (pair.num_speculative_tokens + 1), row * at_once


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
