"""What an actor does that Ray has started again: nobody calls it then, so it calls itself."""

import threading
import time
from typing import Any, Final

import ray
from ray.exceptions import RayActorError

_PAUSE_S: Final = 0.1


def was_restarted() -> bool:
    """Of the actor whose process this is."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def call_own(method: str) -> None:
    """Of the actor that is being constructed, once it can be called: as long as Ray has heard of the last one's end and
    not of this one's beginning, calls fail. What the method raises is for its own log; it may be called twice."""
    own: Any = getattr(ray.get_runtime_context().current_actor, method)

    def call() -> None:
        while True:
            try:
                ray.get(own.remote())
            except RayActorError:
                time.sleep(_PAUSE_S)
            else:
                return

    threading.Thread(target=call, name="dspark-again", daemon=True).start()
