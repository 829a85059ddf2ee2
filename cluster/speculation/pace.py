"""How long rounds take, by their size, and from that when one is overdue."""

from dataclasses import dataclass
from typing import Final

_KNOWN_AFTER: Final = 3
"""Rounds of a size: the first ones compile, and page memory in."""

_DECAY: Final = 0.99
"""Of the longest round so far, each time: an hour-old outlier shall not hide a draft that hangs."""


@dataclass(slots=True)
class _Size:
    rounds: int = 0
    longest_s: float = 0.0


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
        if self._stall_limit_s is None or size is None or size.rounds < _KNOWN_AFTER:
            return self.deadline_s
        return min(size.longest_s + self._stall_limit_s, self.deadline_s)

    def took(self, num_tokens: int, seconds: float) -> None:
        """A round has been answered."""
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size())
        size.rounds += 1
        size.longest_s = max(seconds, size.longest_s * _DECAY)
