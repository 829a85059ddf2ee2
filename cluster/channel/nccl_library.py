"""The calls of NCCL that a pair of processes needs, from the library that torch has loaded. Communicators, streams and
addresses are numbers; a failure is a RuntimeError.

Neither of the bindings that are there will do. torch's process group ends its process when a communicator fails, by
settings that vLLM's own groups share. vLLM's wrapper refuses a library without every function of NCCL 2.29.7, and
torch 2.11 comes with an older one. These six calls are in all since 2.7.
"""

import ctypes
from functools import cache
from typing import Final

from cluster.channel.errors import ChannelUnavailable

UNIQUE_ID_BYTES: Final = 128

_LIBRARY: Final = "libnccl.so.2"
_BYTES: Final = 1  # ncclUint8


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


_ADDRESS, _COMMUNICATOR, _STREAM = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
_TRANSFER: Final = (_ADDRESS, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMMUNICATOR, _STREAM)
_ARGUMENTS: Final = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_COMMUNICATOR), ctypes.c_int, _UniqueId, ctypes.c_int),
    "ncclSend": _TRANSFER,
    "ncclRecv": _TRANSFER,
    "ncclCommAbort": (_COMMUNICATOR,),
}


def require() -> None:
    """Raises ChannelUnavailable where there is no NCCL."""
    _library()


def unique_id() -> bytes:
    """For the two that are to meet. This process listens for them from now on."""
    made = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


def join(unique_id: bytes, rank: int) -> int:
    """A communicator of two, on the current GPU. Waits for the other, without end."""
    communicator = _COMMUNICATOR()
    _call("ncclCommInitRank", ctypes.byref(communicator), 2, _UniqueId.from_buffer_copy(unique_id), rank)
    assert communicator.value is not None
    return communicator.value


def send(communicator: int, address: int, num_bytes: int, peer: int, stream: int) -> None:
    """Put it on the stream. The first one waits for the peer's `receive`, without end."""
    _call("ncclSend", address, num_bytes, _BYTES, peer, communicator, stream)


def receive(communicator: int, address: int, num_bytes: int, peer: int, stream: int) -> None:
    """As `send`."""
    _call("ncclRecv", address, num_bytes, _BYTES, peer, communicator, stream)


def abort(communicator: int) -> None:
    """End what is on streams, wait for that, and give everything back; asks the peer nothing. No other thread may be
    in a call of this communicator, or make one afterwards."""
    _call("ncclCommAbort", communicator)


def _call(name: str, *arguments: object) -> None:
    library = _library()
    status: int = getattr(library, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: {library.ncclGetErrorString(status).decode()}")


@cache
def _library() -> ctypes.CDLL:
    import torch  # noqa: F401 - with it the library is loaded, and found by its name

    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ChannelUnavailable("the nccl channel", f"NCCL isn't there ({error})", "use the gloo channel") from None
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (ctypes.c_int,), ctypes.c_char_p
    return library
