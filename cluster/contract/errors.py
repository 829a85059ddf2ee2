"""What the contract can answer with, apart from a contract."""

import difflib
from dataclasses import dataclass
from enum import Enum

from cluster.errors import UserError


class DocumentError(UserError):
    """A JSON document, or a value built by hand, that isn't what its type says. `path` is the key that is wrong."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(
            f"{path or 'the document'} is {found}",
            f"it must be {expected}",
            "write the document again with the version that reads it",
        )
        self.path = path
        self.found = found
        self.expected = expected

    def below(self, parent: str) -> "DocumentError":
        """The same error, seen from the key that holds the value."""
        return DocumentError(join_path(parent, self.path), self.found, self.expected)

    def at(self, source: str) -> UserError:
        """The same error about what a person wrote: `source` is a file, a line of it, or a flag."""
        where = f"{source}: {self.path}" if self.path else source
        if self.found == "missing":
            return UserError(where, "it is missing", "give it")
        return UserError(f"{where} is {self.found}", f"it must be {self.expected}", "change it")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.found, self.expected)


class UnknownKey(DocumentError):  # noqa: N818 - it names what is wrong, as DocumentError's others do in `found`
    """A key that the document's type doesn't have. `known` are those that it has there."""

    def __init__(self, path: str, known: tuple[str, ...]) -> None:
        super().__init__(path, "unknown", "one of " + ", ".join(known))
        self.known = known

    def at(self, source: str) -> UserError:
        near = difflib.get_close_matches(self.path.rpartition(".")[2], self.known, n=1)
        remedy = f"did you mean {near[0]}? There are" if near else "there are"
        return UserError(f"{source}: {self.path}", "there is no such key", f"{remedy} {', '.join(self.known)}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.known)


class ContractError(UserError):
    """No contract: the two sides can't be run as one pair. Raised before anything is allocated.

    `field` is named as in vLLM; `target` and `draft` are its values on the two sides, as text, and None on a side that
    has no part in the conflict.
    """

    def __init__(self, field: str, *, target: str | None, draft: str | None, reason: str, remedy: str) -> None:
        self.field = field
        self.target = target
        self.draft = draft
        self.reason = reason
        sides = (("target", target), ("draft", draft))
        values = " and ".join(f"{value} on the {side}" for side, value in sides if value is not None)
        super().__init__(f"{field} is {values}", reason, remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return _contract_error, (self.field, self.target, self.draft, self.reason, self.remedy)


def _contract_error(field: str, target: str | None, draft: str | None, reason: str, remedy: str) -> ContractError:
    return ContractError(field, target=target, draft=draft, reason=reason, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who wrote a field: the class whose method was at work, the function, and its line."""

    class_name: str
    """The runtime class of the nearest `self` up the stack: the layer or model, not the helper it called."""
    function: str
    location: str
    """File inside its package, and line: the same on every machine."""

    def __str__(self) -> str:
        where = f"{self.function} ({self.location})"
        return f"{self.class_name} in {where}" if self.class_name else where


class ContractViolation(RuntimeError):  # noqa: N818 - it names what happened, as the design does
    """An accepted contract was broken: a sealed field was written, or something else was allocated.

    Not a user's mistake: the process that sees it must stop, for what it would allocate or read is not what its
    peer relies on. `writer` is None where nobody was caught at it: a geometry, or a change in place.
    """

    def __init__(self, field: str, *, old: object, new: object, reason: str, writer: Writer | None = None) -> None:
        self.field = field
        self.old = old
        self.new = new
        self.reason = reason
        self.writer = writer
        text = f"{field} is {as_text(new)}, not {as_text(old)}"
        if writer is not None:
            text = f"{field} was {as_text(old)}, and {writer} wrote {as_text(new)}"
        super().__init__(f"{text}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        # As text: the values may be objects that the other process can't build.
        return _contract_violation, (self.field, as_text(self.old), as_text(self.new), self.reason, self.writer)


def _contract_violation(field: str, old: str, new: str, reason: str, writer: Writer | None) -> ContractViolation:
    return ContractViolation(field, old=old, new=new, reason=reason, writer=writer)


def as_text(value: object) -> str:
    """A config value as a person would write it: an enum by its name, a string bare, the rest by repr.

    The same in every process, so that it can be compared: an object whose repr is its address has its class's name.
    """
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return value
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)


def join_path(parent: str, child: str) -> str:
    """`groups[0]` and `name` make `groups[0].name`; `groups` and `[0]` make `groups[0]`."""
    if not parent or not child:
        return parent or child
    return f"{parent}{child}" if child.startswith("[") else f"{parent}.{child}"


def require_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise DocumentError(name, str(value), "positive")


def require_some(**values: tuple[object, ...]) -> None:
    for name, value in values.items():
        if not value:
            raise DocumentError(name, "empty", "at least one")
