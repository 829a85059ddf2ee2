"""What speculation achieved, in vLLM's terms."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFigures:
    """Counts over some rounds. `accepted_by_position[i]`: rounds whose draft i (from 0) was accepted."""

    rounds: int
    drafted: int
    accepted_by_position: tuple[int, ...]

    def __add__(self, other: "AcceptanceFigures") -> "AcceptanceFigures":
        """Of both together, which have the same K."""
        positions = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return AcceptanceFigures(
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            accepted_by_position=tuple(map(sum, positions)),
        )

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the target's own (bonus) token included: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def rate_by_position(self) -> tuple[float, ...]:
        return tuple(count / self.rounds if self.rounds else 0.0 for count in self.accepted_by_position)

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_by_position": list(self.rate_by_position),
        }
