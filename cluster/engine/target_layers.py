"""In a draft's process, what stands for the target's layers whose keys and values the draft reads (Gemma 4's MTP).

vLLM 0.32 wires such a draft to layers of the same process (`v1/worker/gpu/spec_decode/gemma4/speculator.py`): to the
last target layer of each type that keeps KV of its own. Here these are attention layers without a model round them.
They have the geometry that the *draft's* config gives its target, so that the contract finds where that is wrong.
"""

from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype

from cluster.errors import UserError


def stand_ins(vllm_config: VllmConfig, device: torch.device) -> dict[str, torch.nn.Module]:
    """The layers by the target's names for them, registered in `vllm_config`; none for drafts that keep their own KV.

    Raises:
        UserError: the target has no layer of a type that the draft reads.
    """
    speculative = vllm_config.speculative_config
    if not speculative.use_gemma4_mtp():
        return {}
    target, draft = vllm_config.model_config, speculative.draft_model_config.hf_config.get_text_config()
    kept = _types_kept(target.hf_text_config)
    layers: dict[str, torch.nn.Module] = {}
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(target.dtype), device:
        for index, layer_type in enumerate(draft.layer_types):
            if layer_type not in kept:
                raise UserError(
                    f"draft {speculative.draft_model_config.model}",
                    f"its layer {index} reads the KV of a {layer_type} layer, and the target keeps KV in none",
                    "use a draft that was trained for this target",
                )
            last = len(kept) - 1 - kept[::-1].index(layer_type)
            # A target with other inputs has its text model inside.
            inside = "language_model." if target.hf_config is not target.hf_text_config else ""
            name = f"{inside}model.layers.{last}.self_attn.attn"
            if name not in layers:
                layers[name] = _attention(vllm_config, draft, index, name)
    return layers


def readers(vllm_config: VllmConfig, name: str) -> list[Any]:
    """The draft's layers that read the KV of the target's layer `name`."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if getattr(layer, "kv_sharing_target_layer_name", None) == name]


def _types_kept(target: Any) -> list[str]:
    """The types of the target's layers that have KV of their own: the last ones may share that of earlier ones."""
    kept: list[str] = target.layer_types[: target.num_hidden_layers - (target.num_kv_shared_layers or 0)]
    return kept


def _attention(vllm_config: VllmConfig, draft: Any, index: int, name: str) -> torch.nn.Module:
    """As `Gemma4MTPAttention` builds the draft's layer `index`, so that both have one set of attention metadata."""
    layer = draft.per_layer_config[index]
    is_sliding = draft.layer_types[index] == "sliding_attention"
    attention: torch.nn.Module = Attention(
        draft.num_attention_heads,
        layer.head_dim,
        1.0,
        num_kv_heads=layer.num_key_value_heads,
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        per_layer_sliding_window=draft.sliding_window if is_sliding else None,
        prefix=name,
    )
    return attention
