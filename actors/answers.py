"""Answers of actors, and what went wrong where there is none."""

from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.contract.errors import ContractViolation
from cluster.contract.facts import Role
from cluster.control.refusals import to_error, to_refusal
from cluster.errors import UserError
from cluster.serving.engine import EngineDeadError

CALL_TIMEOUT_S: Final = 60.0
"""For an actor's process to start and to answer, without loading a model; 3 s on an idle machine."""

HEALTH_TIMEOUT_S: Final = 5.0
"""For a health call, which waits behind nothing of the actor's own work."""


def answer_of(name: str, answer: Any, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """What the actor `name` answers.

    Raises:
        UserError: what it raised, or that it has ended, or is silent.
    """
    try:
        return ray.get(answer, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, ContractViolation):
            role: Role = "draft" if name.startswith("draft") else "target"
            raise to_error(to_refusal(error.cause, role)) from error
        if isinstance(error.cause, UserError):
            raise error.cause from error
        if isinstance(error.cause, EngineDeadError):
            raise UserError(f"{name}'s engine", str(error.cause), "look at its log, in Ray's session folder") from error
        raise
    except RayActorError as error:
        why = " ".join(str(error).split())
        raise UserError(f"{name}'s process has ended", why, "look at its log, in Ray's session folder") from error
    except GetTimeoutError as error:
        raise UserError(
            f"{name} hasn't answered in {timeout_s:g} s", "it is held up", "look at its log, in Ray's session folder"
        ) from error


def ask_health(name: str, method: str = "health") -> Any:
    """What the actor of this name says of itself, or None where it doesn't answer."""
    try:
        return answer_of(name, getattr(ray.get_actor(name), method).remote(), timeout_s=HEALTH_TIMEOUT_S)
    except (UserError, ValueError):  # ValueError is Ray's answer to a name that nobody has
        return None
