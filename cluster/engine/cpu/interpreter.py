"""Repairs of Triton's interpreter (3.9), without which vLLM's kernels fail or crawl on a CPU.

Three faults, each mended where it is:

* A masked load or store hands the mask's buffer to C++ as it is; a mask that is a broadcast view, or not boolean,
  or of another shape than the pointers, is refused or misread. It is made a contiguous boolean array first.
* Every launch copies each argument's whole storage back onto itself afterwards, which for a view into a KV cache
  means the whole cache. On a CPU the arguments are the memory that the kernel wrote: nothing is left to copy.
* Every launch patches `triton.language` for interpretation, member by member, and un-patches it: 10 ms of
  reflection for a kernel that runs for 1 ms. In a process whose kernels are all interpreted, once is enough.
"""

import inspect
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def repair() -> None:
    """Install the repairs in this process; a second call changes nothing."""
    builder = interpreter.InterpreterBuilder
    if builder.create_masked_load is _masked_load:
        return
    builder.create_masked_load = _masked_load
    builder.create_masked_store = _masked_store
    interpreter.GridExecutor._init_args_hst = _arguments_in_place
    interpreter.GridExecutor._restore_args_dev = _nothing_to_copy_back
    interpreter._patch_lang = _patch_lang_once


def _mask_for(pointers: Any, mask: Any) -> Any:
    """`mask` as C++ reads it: contiguous, boolean, of the shape of `pointers`."""
    data = np.ascontiguousarray(np.broadcast_to(np.asarray(mask.data, dtype=np.bool_), pointers.data.shape))
    return interpreter.TensorHandle(data, tl.int1)


_original_masked_load = interpreter.InterpreterBuilder.create_masked_load
_original_masked_store = interpreter.InterpreterBuilder.create_masked_store
_original_patch_lang = interpreter._patch_lang


def _masked_load(builder: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any) -> Any:
    return _original_masked_load(builder, ptrs, _mask_for(ptrs, mask), other, cache_policy, is_volatile)


def _masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
    return _original_masked_store(builder, ptrs, value, _mask_for(ptrs, mask), cache_policy)


def _arguments_in_place(_executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return args, kwargs


def _nothing_to_copy_back(_executor: Any, *_: Any) -> None:
    return None


class _StaysPatched:
    def restore(self) -> None:
        return None


_patched: set[int] = set()


def _patch_lang_once(fn: Any) -> _StaysPatched:
    modules = frozenset(id(v) for v in fn.__globals__.values() if inspect.ismodule(v) and (v is tl or v is tl.core))
    if not modules <= _patched:
        _original_patch_lang(fn)
        _patched.update(modules)
    return _StaysPatched()
