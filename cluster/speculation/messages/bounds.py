"""The check that every index of a message is in its range, in as few numpy calls as there can be.

A call costs microseconds, whatever it does to 32 numbers. So neighbouring sections of one dtype are compared as one
run of memory with one array of their largest values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.speculation.messages.errors import MessageError
from cluster.speculation.messages.layout import I32, I64, Layout, Section

# Seen as unsigned, negative numbers are the largest, so one comparison finds both ends.
_UNSIGNED: Final[dict[np.dtype[Any], np.dtype[Any]]] = {I32: np.dtype("<u4"), I64: np.dtype("<u8")}

# A larger section is a run of its own with one limit, so that the limits of a layout stay small enough to keep.
_SHARED_RUN_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class _Run:
    sections: tuple[Section, ...]
    dtype: np.dtype[Any]
    offset: int
    length: int
    most: NDArray[Any]
    """The largest value of each place, or of all; what pads sections may be anything."""

    @classmethod
    def over(cls, sections: tuple[Section, ...]) -> "_Run":
        dtype = _UNSIGNED[sections[0].tensor.dtype]
        offset = sections[0].offset
        length = (sections[-1].end - offset) // dtype.itemsize
        if len(sections) == 1:
            return cls(sections, dtype, offset, length, np.array(_most(sections[0]), dtype))
        most = np.full(length, np.iinfo(dtype).max, dtype)
        for section in sections:
            start, end = (section.offset - offset) // dtype.itemsize, (section.end - offset) // dtype.itemsize
            most[start:end] = _most(section)
        return cls(sections, dtype, offset, length, most)

    def check(self, buffer: memoryview) -> None:
        run = np.ndarray((self.length,), self.dtype, buffer, self.offset)
        if np.count_nonzero(run > self.most):  # a third of the time of any()
            raise MessageError(_first_outside(self.sections, buffer))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one layout."""

    runs: tuple[_Run, ...]

    @classmethod
    def of(cls, layout: Layout) -> "Bounds":
        return cls(tuple(_Run.over(sections) for sections in _neighbours(layout)))

    def check(self, buffer: memoryview) -> None:
        """Raises MessageError with the first section that has a value outside its range, and that value."""
        for run in self.runs:
            run.check(buffer)


def _neighbours(layout: Layout) -> Iterator[tuple[Section, ...]]:
    def key(section: Section) -> tuple[object, int]:
        alone = section.offset if section.num_bytes > _SHARED_RUN_BYTES else 0
        return (section.tensor.dtype if section.tensor.below is not None else None), alone

    for (dtype, _), sections in groupby(layout.sections, key):
        if dtype is not None:
            yield tuple(sections)


def _most(section: Section) -> int:
    return (section.tensor.below or 0) - 1


def _first_outside(sections: tuple[Section, ...], buffer: memoryview) -> str:
    for section in sections:
        values, below = section.view(buffer), section.tensor.below
        outside = (values < 0) | (values >= below)
        if outside.any():
            return f"{section.tensor.name} has {values[outside][0]}, it must be at least 0 and below {below}"
    return "a number was out of its range, and another when looked at again: the buffer is being written to"
