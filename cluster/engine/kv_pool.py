"""Where vLLM's KV pool lies: its one allocation, given memory of ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cluster.errors import UserError


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


def require_exportable(*, sleep_mode: bool, allocator_settings: str) -> None:
    """Before a GPU's pool is allocated that another process is to open: CUDA gives a handle for memory of cudaMalloc
    and cuMemAlloc, and none for what these map piece by piece. `allocator_settings` are torch's (PYTORCH_ALLOC_CONF).

    Raises:
        UserError: one of them is on.
    """
    remedy = "leave it out, or take the shm channel: the draft then keeps a copy"
    why = "the draft maps the target's KV pool, and CUDA exports no handle of the memory that this allocates"
    if sleep_mode:
        raise UserError("enable_sleep_mode", why, remedy)
    in_effect = allocator_settings.replace(" ", "").lower()
    for setting in ("expandable_segments:True", "backend:cudaMallocAsync"):
        if setting.lower() in in_effect:
            raise UserError(setting, why, remedy)
