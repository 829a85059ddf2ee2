"""A cluster's end: requests finish, engines close, and nothing stays."""

import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.exceptions import RayError

from actors.answers import ask_health
from actors.gateway import GatewayHealth
from actors.names import COORDINATOR, GATEWAY
from actors.placement import release
from cluster.channel.segment import remove_orphans

_STOP_TIMEOUT_S: Final = 30.0
"""For an engine to close: it takes 3 s to unload vLLM, longer on a busy host. What is left is killed."""

_KILL_TIMEOUT_S: Final = 15.0
"""For Ray to end the processes of actors that it was told to kill."""


def down(say: Callable[[str], None]) -> list[str]:
    """Stop the cluster in this process's Ray namespace, however much of it there is; returns its actors' names."""
    actors = {name: ray.get_actor(name) for name in sorted(ray.util.list_named_actors())}
    if GATEWAY in actors:
        say("ends the last requests")
        gateway: GatewayHealth | None = ask_health(GATEWAY)
        _stop([actors[GATEWAY]], _STOP_TIMEOUT_S + (gateway.drain_grace_s if gateway is not None else 0.0))
    say("closes the engines")
    _stop([actor for name, actor in actors.items() if name.startswith("target")], _STOP_TIMEOUT_S)
    if COORDINATOR in actors:
        _stop([actors[COORDINATOR]], _STOP_TIMEOUT_S)
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    _await_none()
    release()
    remove_orphans()
    return list(actors)


def _stop(actors: list[Any], timeout_s: float) -> None:
    answers = [actor.stop.remote() for actor in actors]
    ended, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s) if answers else ([], [])
    for answer in ended:
        try:
            ray.get(answer)
        except RayError:
            continue  # it has ended, which is what was wanted


def _await_none() -> None:
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while ray.util.list_named_actors() and time.monotonic() < deadline_s:
        time.sleep(0.05)
