"""Where the tensors of a message lie: one after the other behind the header, each on a cache line of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.speculation.messages.errors import MessageError
from cluster.speculation.messages.header import HEADER_BYTES

ALIGNMENT: Final = 64

I32: Final = np.dtype("<i4")
I64: Final = np.dtype("<i8")
F32: Final = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a message says of one tensor before it has a place."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    below: int | None = None
    """Every value is at least 0 and below it; None where any value will do. Integers only."""


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor at its place, contiguous."""

    tensor: Tensor
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def view(self, buffer: memoryview) -> NDArray[Any]:
        return np.ndarray(self.tensor.shape, self.tensor.dtype, buffer, self.offset)

    def write(self, view: NDArray[Any], array: NDArray[Any]) -> None:
        """`view` is this section's, of whichever buffer."""
        tensor = self.tensor
        if array.shape != tensor.shape or array.dtype != tensor.dtype:
            found, expected = _describe(array.dtype, array.shape), _describe(tensor.dtype, tensor.shape)
            raise MessageError(f"{tensor.name} is {found}, the round sizes make it {expected}")
        view[...] = array


@dataclass(frozen=True, slots=True)
class Layout:
    """The sections of a message with known counts."""

    sections: tuple[Section, ...]
    num_bytes: int
    """Of the whole message, header included."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "Layout":
        sections = []
        end = HEADER_BYTES
        for tensor in tensors:
            num_bytes = tensor.dtype.itemsize
            for length in tensor.shape:  # exact integers: numpy's product would wrap
                num_bytes *= length
            section = Section(tensor, -(-end // ALIGNMENT) * ALIGNMENT, num_bytes)
            sections.append(section)
            end = section.end
        return cls(tuple(sections), end)

    def views(self, buffer: memoryview) -> list[NDArray[Any]]:
        if len(buffer) != self.num_bytes:
            raise MessageError(f"the message has {len(buffer)} bytes, its counts make it {self.num_bytes}")
        return [section.view(buffer) for section in self.sections]

    def write(self, views: Sequence[NDArray[Any]], arrays: Sequence[NDArray[Any]]) -> None:
        """`views` are those of whichever buffer."""
        if len(arrays) != len(self.sections):
            names = ", ".join(section.tensor.name for section in self.sections)
            raise MessageError(f"the message has {len(arrays)} tensors, the round sizes say {names}")
        for section, view, array in zip(self.sections, views, arrays, strict=True):
            section.write(view, array)


def _describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype.name}{list(shape)}"
