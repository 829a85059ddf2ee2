"""What each attention layer asks vLLM's selector for, seen while the layers are built.

The question names head size, dtypes, causality and the rest, so it can be put again, to every backend of the platform.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from cluster.contract.vllm_names import AttentionLayerBase, AttentionSelectorConfig, selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """One layer's question. `requested` is the backend that its config names, None where vLLM is to choose."""

    requested: Any
    config: AttentionSelectorConfig
    num_heads: int | None


@contextmanager
def record_selections() -> Iterator[dict[object, Selection]]:
    """Collect the selections of the layers that are built while the block runs, by layer.

    A layer whose class wires its backend asks nothing, and isn't there.
    """
    selections: dict[object, Selection] = {}
    original = selector._cached_get_attn_backend

    def recording(**question: Any) -> Any:
        layer = _layer_under_construction(sys._getframe(1))
        if layer is not None:
            selections[layer] = Selection(
                requested=question["backend"],
                config=question["attn_selector_config"],
                num_heads=question["num_heads"],
            )
        return original(**question)

    selector._cached_get_attn_backend = recording
    try:
        yield selections
    finally:
        selector._cached_get_attn_backend = original


def _layer_under_construction(frame: FrameType | None) -> object | None:
    while frame is not None:
        layer = frame.f_locals.get("self")
        if isinstance(layer, AttentionLayerBase):
            return cast(object, layer)
        frame = frame.f_back
    return None
