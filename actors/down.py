"""A cluster's end: requests finish, engines close, and nothing stays."""

import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.exceptions import RayError

from actors.names import COORDINATOR, GATEWAY
from actors.placement import release
from cluster.channel.segment import remove_orphans
from cluster.serving.settings import DRAIN_GRACE_S

_STOP_TIMEOUT_S: Final = 30.0
"""For an engine to close: it takes 3 s to unload vLLM, longer on a busy host. What is left is killed."""

_KILL_TIMEOUT_S: Final = 15.0
"""For Ray to end the processes of actors that it was told to kill."""


def down(say: Callable[[str], None]) -> list[str]:
    """Stop the cluster in this process's Ray namespace, however much of it there is; returns its actors' names."""
    actors = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
    stopping = [
        ({GATEWAY}, "ends the last requests", DRAIN_GRACE_S + _STOP_TIMEOUT_S),
        ({name for name in actors if name.startswith("target")}, "closes the engines", _STOP_TIMEOUT_S),
        ({COORDINATOR}, "stops the coordinator", _STOP_TIMEOUT_S),
    ]
    for names, what, timeout_s in stopping:
        present = [actors[name] for name in sorted(names & actors.keys())]
        if present:
            say(what)
            _stop(present, timeout_s)
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    _await_none()
    release()
    remove_orphans()
    return sorted(actors)


def _stop(actors: list[Any], timeout_s: float) -> None:
    answers = [actor.stop.remote() for actor in actors]
    ended, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
    for answer in ended:
        try:
            ray.get(answer)
        except RayError:
            continue  # it has ended, which is what was wanted


def _await_none() -> None:
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while ray.util.list_named_actors() and time.monotonic() < deadline_s:
        time.sleep(0.05)
