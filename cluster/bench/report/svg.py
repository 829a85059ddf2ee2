"""Drawing: scales with round ticks, and elements of SVG as text. Colours are CSS classes: a page has two themes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values, 0 to `most`, to pixels, `start` to `end`."""

    most: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * value / self.most

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> "Scale":
        """Up to the round number above all values."""
        most = max(values, default=0.0) or 1.0
        step = tick_step(most)
        return cls(most=step * math.ceil(most / step - 1e-9), start=start, end=end)

    @property
    def ticks(self) -> list[float]:
        step = tick_step(self.most)
        return [step * index for index in range(round(self.most / step) + 1)]


def tick_step(most: float) -> float:
    """1, 2 or 5 times a power of ten, for three to six ticks."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 6)


def shown(value: float) -> str:
    """Three digits or so, as a person reads them."""
    size = abs(value)
    if size and size < 0.01:
        return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}"
    return f"{value:,.0f}" if size >= 100 or value == int(value) else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """`class_` is class, `text_anchor` text-anchor; numbers to a tenth of a pixel."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value:.1f}" if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{content}</{name}>"


def tooltip(said: str) -> str:
    """As an element's content: it shows under the pointer."""
    return f"<title>{escape(said)}</title>"


def text(said: str, x: float, y: float, **attributes: object) -> str:
    return element("text", escape(said), x=x, y=y, **attributes)


def figure(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """A drawing that grows with its page, and is scrolled where it would be too small to read. `label` is for those who
    can't see it."""
    svg = element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width} {height}",
        style=f"min-width: {round(0.8 * width)}px",
        role="img",
        aria_label=label,
        class_="plot",
    )
    return f'<div class="scroll">{svg}</div>'
