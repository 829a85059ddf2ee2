"""What a batch has come to."""

from collections import Counter
from dataclasses import dataclass, field

from cluster.client import Response
from cluster.speculation.figures import AcceptanceFigures


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of lines, by what became of them in this run; `before` were answered in earlier ones."""

    total: int
    before: int
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By status."""
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    acceptance: AcceptanceFigures | None = None
    """None without a draft."""

    @property
    def ended(self) -> int:
        """Lines with an answer or a failure, earlier answers included."""
        return self.before + self.answered + self.failed.total()

    @property
    def complete(self) -> bool:
        """Whether every line has its answer."""
        return self.before + self.answered == self.total

    def add(self, response: Response) -> None:
        self.answered += 1
        self.prompt_tokens += response.usage.prompt_tokens
        self.completion_tokens += response.usage.completion_tokens
        for choice in response.choices:
            if choice.speculation is not None:
                gained = choice.speculation.acceptance
                self.acceptance = gained if self.acceptance is None else self.acceptance + gained

    def rows(self) -> list[tuple[str, int]]:
        """The summary: a status and its lines, those that never ran last."""
        rows = [("OK", self.before + self.answered), *sorted(self.failed.items())]
        if waiting := self.total - self.ended:
            rows.append(("not run", waiting))
        return rows
