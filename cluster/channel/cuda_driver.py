"""The calls of the CUDA driver that torch has no function for. Every address is a number, of the device or of the host.

Needs a current context: torch's, once the process has chosen its GPU. A failure of the driver is a RuntimeError.
"""

import ctypes
from functools import cache
from typing import Any, Final

from cluster.channel.errors import ChannelUnavailable

# From the CUDA driver API.
_HOST_REGISTER_PORTABLE_AND_MAPPED: Final = 0x01 | 0x02
_IPC_LAZY_ENABLE_PEER_ACCESS: Final = 0x01
_WAIT_GREATER_OR_EQUAL: Final = 0x0
_WRITE_AFTER_A_BARRIER: Final = 0x0
_STREAM_NON_BLOCKING: Final = 0x1

IPC_HANDLE_BYTES: Final = 64


def allocate(num_bytes: int) -> int:
    """Plain device memory, zeroed. Not of torch's pool, whose segments, if they can grow, can't be exported."""
    (address,) = _call("cuMemAlloc", num_bytes)
    _call("cuMemsetD8", address, 0, num_bytes)
    _call("cuCtxSynchronize")
    return int(address)


def free(address: int) -> None:
    _call("cuMemFree", address)


def allocation_of(address: int) -> tuple[int, int]:
    """The beginning and the bytes of the allocation in which the address lies: an IPC handle is of the whole."""
    base, num_bytes = _call("cuMemGetAddressRange", address)
    return int(base), int(num_bytes)


def export(address: int) -> bytes:
    """A handle of the allocation that begins there."""
    (handle,) = _call("cuIpcGetMemHandle", address)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)  # not all versions of the bindings show the bytes


def open_exported(handle: bytes) -> int:
    """Of another process, on this GPU or on one that this one reaches."""
    if len(handle) != IPC_HANDLE_BYTES:
        raise RuntimeError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, this one {len(handle)}")
    opaque = _driver().CUipcMemHandle()
    ctypes.memmove(opaque.getPtr(), handle, IPC_HANDLE_BYTES)
    (address,) = _call("cuIpcOpenMemHandle", opaque, _IPC_LAZY_ENABLE_PEER_ACCESS)
    return int(address)


def close_exported(address: int) -> None:
    _call("cuIpcCloseMemHandle", address)


def register_host_memory(address: int, num_bytes: int) -> int:
    """Let the GPU read and write these pages of this process; returns their address there."""
    _call("cuMemHostRegister", address, num_bytes, _HOST_REGISTER_PORTABLE_AND_MAPPED)
    try:
        (mapped,) = _call("cuMemHostGetDevicePointer", address, 0)
    except RuntimeError:
        unregister_host_memory(address)  # the caller unmaps them
        raise
    return int(mapped)


def unregister_host_memory(address: int) -> None:
    _call("cuMemHostUnregister", address)


def create_stream() -> int:
    """One that no other part of this process has, as it may with those of torch's pool."""
    (stream,) = _call("cuStreamCreate", _STREAM_NON_BLOCKING)
    return int(stream)


def destroy_stream(stream: int) -> None:
    _call("cuStreamDestroy", stream)


def stream_write(stream: int, address: int, value: int) -> None:
    """Write 32 bits when the stream gets here, after all that it wrote before can be seen."""
    _call("cuStreamWriteValue32", stream, address, value, _WRITE_AFTER_A_BARRIER)


def stream_wait(stream: int, address: int, value: int) -> None:
    """Let the stream go on when the 32 bits are `value` or later, counted in a circle."""
    _call("cuStreamWaitValue32", stream, address, value, _WAIT_GREATER_OR_EQUAL)


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
    status, *results = getattr(_driver(), name)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{name}: {getattr(status, 'name', status)}")
    return tuple(results)


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ChannelUnavailable(
            "a channel between GPUs",
            f"cuda.bindings isn't there ({error})",
            "pip install cuda-bindings, or use shm or gloo",
        ) from None
    return driver
