"""A target and its draft as configs alone: vLLM's `load_format="dummy"` fills them with random weights.

For time and memory, which don't depend on the weights: how many drafts are accepted is a setting, too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import ModelFolder, open_model

NUM_SPECULATIVE_TOKENS: Final = 7

# Qwen/Qwen3-8B, and a draft of five of its layers that reads as many of its states.
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
_DSPARK: Final = _QWEN3_8B | {
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "block_size": NUM_SPECULATIVE_TOKENS,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 151669,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DummySettings(EngineSettings):
    """As its base, without weights, tokenizer and chance.

    `acceptance_length`: tokens a round, on average, the target's own included.
    """

    acceptance_length: float

    def to_engine_args(self) -> dict[str, Any]:
        arguments = EngineSettings.to_engine_args(self)
        if self.speculation is not None:
            arguments["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": self.acceptance_length,
            }
        return arguments | {"load_format": "dummy", "skip_tokenizer_init": True}


def dummy_settings(folder: Path, *, with_draft: bool, acceptance_length: float, **sizes: Any) -> DummySettings:
    """Write the configs under `folder`; `sizes` are those of EngineOptions."""
    target = _write(folder / "target", _QWEN3_8B, role="target")
    speculation = plan_speculation(target, _write(folder / "draft", _DSPARK, role="draft"), None)
    return DummySettings(
        target=target,
        speculation=speculation if with_draft else None,
        acceptance_length=acceptance_length,
        **sizes,
    )


def _write(folder: Path, config: dict[str, Any], *, role: str) -> ModelFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return open_model(str(folder), role=role, weights=False)
