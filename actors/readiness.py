"""The wait until all pairs serve, and the reason where one doesn't come to that."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import ray
from ray.exceptions import RayError

from actors.answers import answer_of
from cluster.contract.errors import ContractError
from cluster.control.refusals import ControlError
from cluster.engine.vllm_errors import EngineStartError
from cluster.errors import UserError

_POLL_S: Final = 0.3
"""How often the coordinator is asked how far the pairs are."""

_OTHER_SIDE_S: Final = 5.0
"""For the other side of a pair that doesn't start to say why: of the two, one knows more."""


def await_ready(
    targets: Mapping[str, Any],
    drafts: Mapping[str, Any],
    *,
    activities: Callable[[], Mapping[str, str]],
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Until each of `targets`, answers by actor, is there. An answer of one of `drafts` says that it serves no more.

    `activities` by actor, as the coordinator knows them; `say` is told of each that is new.

    Raises:
        UserError: what kept one from starting, or the time is up.
    """
    name_of = {answer: name for name, answer in (*targets.items(), *drafts.items())}
    waiting, last = set(targets), dict[str, str]()
    deadline_s = time.monotonic() + timeout_s

    def tell(news: Mapping[str, str]) -> None:
        for name, activity in news.items():
            if last.get(name) not in (activity, "ready"):
                last[name] = activity
                say(f"{name}: {activity}")

    while waiting:
        ended, _ = ray.wait(list(name_of), timeout=_POLL_S)
        for answer in ended:
            name = name_of.pop(answer)
            if (error := _error(name, answer)) is not None:
                raise _most_telling([error, *_errors_of_others(name_of)])
            if name in waiting:
                waiting.remove(name)
                tell({name: "ready"})
        tell(activities())
        if time.monotonic() > deadline_s:
            raise UserError(
                f"{', '.join(sorted(waiting))}: not ready in {timeout_s:g} s",
                ", ".join(f"{name} is at {activity}" for name, activity in sorted(last.items())) or "none has begun",
                "look at Ray's logs, or give it longer by ray.start_timeout_s",
            )


def _error(name: str, answer: Any) -> Exception | None:
    try:
        answer_of(name, answer)
    except (UserError, RayError) as error:
        return error
    return None


def _errors_of_others(name_of: Mapping[Any, str]) -> list[Exception]:
    if not name_of:
        return []
    ended, _ = ray.wait(list(name_of), num_returns=len(name_of), timeout=_OTHER_SIDE_S)
    return [error for answer in ended if (error := _error(name_of[answer], answer)) is not None]


def _most_telling(errors: list[Exception]) -> Exception:
    """A refused contract tells most, and least that the other side is lost."""
    return min(errors, key=_vagueness)


def _vagueness(error: Exception) -> int:
    match error:
        case ContractError():
            return 0
        case EngineStartError():
            return 2
        case ControlError():
            return 3
    return 1
