"""How long rounds take, by their size, and from that when one is overdue."""

from collections import deque
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
        self._sizes: dict[int, _Size] = {}

    def allowed_s(self, num_tokens: int) -> float:
        size = self._sizes.get(num_tokens.bit_length())
        if self._stall_limit_s is None or size is None or not size.seconds:
            return self.deadline_s
        return min(max(size.seconds) + self._stall_limit_s, self.deadline_s)

    def took(self, num_tokens: int, seconds: float) -> None:
        """A round has been answered."""
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size())
        size.rounds += 1
        if size.rounds > _FIRST_ROUNDS:
            size.seconds.append(seconds)
