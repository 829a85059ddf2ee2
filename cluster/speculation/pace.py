"""How long rounds take, by their size, and from that when one is overdue."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

_FIRST_ROUNDS: Final = 3
"""Of a size; they compile, and page memory in, and say nothing about later ones."""

_REMEMBERED: Final = 64
"""An outlier of minutes ago shall not hide a draft that hangs."""


@dataclass(slots=True)
class _Size:
    rounds: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class Pace:
    """A draft that hangs holds up its target for `stall_limit_s` beyond a round as they have been, not for a deadline
    that the first round of a long prompt must fit into."""

    def __init__(self, *, deadline_s: float, stall_limit_s: float | None) -> None:
        """`deadline_s` is for sizes that aren't known yet; with `stall_limit_s` None, for all."""
        self.deadline_s = deadline_s
        self._stall_limit_s = stall_limit_s
        self._sizes: dict[tuple[int, Hashable], _Size] = {}

    def anew(self) -> "Pace":
        """With the same limits, and no size known."""
        return Pace(deadline_s=self.deadline_s, stall_limit_s=self._stall_limit_s)

    def allowed_s(self, num_tokens: int, kind: Hashable = None) -> float:
        """Rounds of different kinds are of different sizes."""
        size = self._sizes.get((num_tokens.bit_length(), kind))
        if self._stall_limit_s is None or size is None or not size.seconds:
            return self.deadline_s
        return min(max(size.seconds) + self._stall_limit_s, self.deadline_s)

    def latest_s(self, num_tokens: int, kind: Hashable = None) -> float | None:
        """What the last round of this size took; None while it isn't known."""
        size = self._sizes.get((num_tokens.bit_length(), kind))
        return size.seconds[-1] if size is not None and size.seconds else None

    def took(self, num_tokens: int, seconds: float, kind: Hashable = None) -> None:
        """A round has been answered."""
        size = self._sizes.setdefault((num_tokens.bit_length(), kind), _Size())
        size.rounds += 1
        if size.rounds > _FIRST_ROUNDS:
            size.seconds.append(seconds)
