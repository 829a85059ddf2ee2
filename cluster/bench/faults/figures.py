"""What a row of the table says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value, as a person reads it, and whether it meets its bar: it does where there is none."""

    name: str
    value: str
    is_met: bool = True

    @classmethod
    def none(cls, name: str, count: int) -> Self:
        """A count that is to be 0."""
        return cls(name=name, value=str(count), is_met=count == 0)

    @classmethod
    def some(cls, name: str, count: int) -> Self:
        """A count that is not to be 0."""
        return cls(name=name, value=str(count), is_met=count > 0)

    @classmethod
    def holds(cls, name: str, is_so: bool) -> Self:
        return cls(name=name, value="yes" if is_so else "no", is_met=is_so)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault."""

    fault: str
    requests: int
    figures: tuple[Figure, ...]
    seconds: float

    @property
    def is_met(self) -> bool:
        return all(figure.is_met for figure in self.figures)


def ms(seconds: float) -> str:
    return f"{1e3 * max(0.0, seconds):.0f} ms"


def span(seconds: Sequence[float]) -> str:
    """From the least to the greatest."""
    return "–".join(f"{max(0.0, each):.2f}" for each in sorted({min(seconds), max(seconds)})) + " s"
