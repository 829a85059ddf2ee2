"""Where vLLM's KV pool lies: its one allocation, given memory of ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class PoolAllocator(TorchFunctionMode):  # type: ignore[misc]  # mypy doesn't follow torch
    """The context in which vLLM 0.32 allocates (`allocate_kv_cache` in `vllm/v1/worker/utils.py`): the pool, a number
    of int8 zeros, is what `allocate` makes of that number."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._allocate = allocate

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func is torch.zeros and keywords.get("dtype") is torch.int8:
            return self._allocate(*args)
        return func(*args, **keywords)


def without_memory(num_bytes: int) -> torch.Tensor:
    """For a draft that maps its target's pool: what vLLM plans for it is never read or written."""
    return torch.empty(num_bytes, dtype=torch.int8, device="meta")
