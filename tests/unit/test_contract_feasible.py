"""Which backends are feasible on CUDA, by vLLM's own CUDA platform class: its answers need a capability, not a GPU."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from cluster.contract import feasible
from cluster.contract.facts import BackendFacts, InfeasibleBackend
from cluster.contract.feasible import BuiltLayer, find_backends
from cluster.contract.selections import Selection

# The platform's module loads the CUDA build's library, which it doesn't need to answer.
with mock.patch.dict(sys.modules, {"vllm._C_stable_libtorch": ModuleType("vllm._C_stable_libtorch")}):
    from vllm.platforms.cuda import CudaPlatformBase


class Hopper(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: ARG003
        return DeviceCapability(9, 0)


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "current_platform", Hopper())


def found(
    backend: AttentionBackendEnum, cache_dtype: str = "auto", **question: Any
) -> tuple[dict[str, BackendFacts], dict[str, InfeasibleBackend]]:
    """Of a GQA layer of 8 KV heads of 128, bfloat16, that was built with `backend`."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    asked = AttentionSelectorConfig(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype=cache_dtype, block_size=None, **question
    )
    layer = SimpleNamespace(get_attn_backend=backend.get_class, kv_cache_dtype=cache_dtype, num_heads=32)
    built = BuiltLayer(layer=layer, spec=spec, selection=Selection(requested=None, config=asked, num_heads=None))
    config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16, hf_text_config=None))
    able, unable = find_backends(built, config)
    return {facts.name: facts for facts in able}, {facts.name: facts for facts in unable}


def test_the_backend_that_the_layer_has_comes_first_and_the_rest_by_vllms_priority() -> None:
    able, _ = found(AttentionBackendEnum.TRITON_ATTN)
    assert next(iter(able)) == "TRITON_ATTN"
    assert "FLEX_ATTENTION" in able


def test_a_backend_without_non_causal_attention_is_refused_with_vllms_reason() -> None:
    causal, _ = found(AttentionBackendEnum.TRITON_ATTN)
    _, unable = found(AttentionBackendEnum.TRITON_ATTN, use_non_causal=True)
    reasons = {reason for other in unable.values() for reason in other.reasons}
    assert "non-causal attention not supported" in reasons
    assert set(unable) - set(causal)


def test_each_format_has_the_rows_of_its_dtype() -> None:
    able, _ = found(AttentionBackendEnum.TRITON_ATTN)
    rows = {format.cache_dtype: format.row_bytes for format in able["TRITON_ATTN"].formats}
    assert rows["auto"] == rows["bfloat16"] == 2 * 8 * 128 * 2
    assert rows["fp8"] == rows["auto"] // 2
    assert next(iter(rows)) == "auto"


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_a_library_that_is_missing_is_a_reason() -> None:
    _, unable = found(AttentionBackendEnum.TRITON_ATTN)
    assert unable["FLASHINFER"].reasons == ("ModuleNotFoundError: No module named 'flashinfer'",)
