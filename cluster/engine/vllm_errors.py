"""What vLLM refuses in an engine's settings, as the error that a user is shown."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import UserError


class EngineStartError(UserError):
    """The engine's own process ended before it was ready: this one doesn't know why."""


@contextmanager
def refused_settings() -> Iterator[None]:
    """Turn a ValueError of the block, vLLM's or pydantic's, into a UserError in one line."""
    from pydantic import ValidationError

    try:
        yield
    except ValueError as error:
        refusals = [part["msg"] for part in error.errors()] if isinstance(error, ValidationError) else [str(error)]
        why = " ".join(" ".join(refusals).split())
        raise UserError("the engine refuses these settings", why, "change them; --debug shows where") from error
