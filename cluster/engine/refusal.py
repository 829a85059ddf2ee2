"""What vLLM refuses in an engine's settings, as an error that a user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import UserError


class EngineStartError(UserError):
    """The engine's own process ended before it was ready: this one doesn't know why."""


@contextmanager
def settings_refused() -> Iterator[None]:
    """Make vLLM's ValueError a UserError, in one line."""
    from pydantic import ValidationError

    try:
        yield
    except ValueError as error:
        refusals = [part["msg"] for part in error.errors()] if isinstance(error, ValidationError) else [str(error)]
        why = " ".join(" ".join(refusals).split())
        raise UserError("the engine refuses these settings", why, "change them; --debug shows where") from error
