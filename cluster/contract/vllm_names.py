"""Every name of vLLM 0.32.0 that the probe and the contract's worker use and that isn't its public API.

Here and nowhere else, so that an upgrade of vLLM fails at this import before it fails anywhere else.
"""

import importlib

# What torch's allocator was told.
from vllm.device_allocator.alloc_conf import alloc_conf_from_env

# The selector asks the platform through the cached function of this module, which `record_selections` stands before.
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase

# The part of a model loader that only calls constructors.
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, set_default_torch_dtype
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

# The layouts that a worker's backends have in common, and the engine core's choice among them.
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.attention.selector import AttentionSelectorConfig

# The engine core's grouping of layers under block tables.
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_quant_mode,
)

# The V2 runner's own reading of its layers, and the layers of the target whose states a draft takes.
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

# What a worker calls before it builds a model.
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

# A backend's packing of its pages.
from vllm.v1.worker.utils import customize_attention_spec

__all__ = [
    "AttentionBackend",
    "AttentionLayerBase",
    "AttentionSelectorConfig",
    "AttentionSpec",
    "FullAttentionSpec",
    "KVCacheSpec",
    "LinearBase",
    "MultipleOf",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "alloc_conf_from_env",
    "customize_attention_spec",
    "get_eagle3_aux_layers_from_config",
    "get_kv_cache_groups",
    "get_kv_cache_spec",
    "get_kv_cache_spec_kind",
    "get_kv_quant_mode",
    "get_supported_kv_cache_layouts",
    "init_speculator",
    "init_worker_distributed_environment",
    "initialize_model",
    "kv_cache_dtype_str_to_dtype",
    "register_all_kvcache_specs",
    "resolve_kv_cache_layout",
    "selector",
    "set_default_torch_dtype",
    "stand_in_for_cuda",
]


def stand_in_for_cuda() -> None:
    """What vLLM's CPU worker does to torch before it builds a model: constructors make CUDA events and streams."""
    importlib.import_module("vllm.v1.worker.cpu.shm")
