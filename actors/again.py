"""What an actor does that Ray has started again: nobody calls it then, so it calls itself."""

import os
import sys
import threading
import time
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

_PAUSE_S: Final = 0.1


def was_restarted() -> bool:
    """Of the actor whose process this is."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def call_own(method: str) -> None:
    """Of the actor that is being constructed, once it can be called: as long as Ray has heard of the last one's end and
    not of this one's beginning, calls fail; it may be called twice.

    Nobody waits for what the method raises: its log has that, and the process ends, so that Ray tries again."""
    own: Any = getattr(ray.get_runtime_context().current_actor, method)

    def call() -> None:
        while True:
            try:
                ray.get(own.remote())
            except RayTaskError as error:
                print(f"{method} failed, and this process ends: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            except RayActorError:
                time.sleep(_PAUSE_S)
            else:
                return

    threading.Thread(target=call, name="dspark-again", daemon=True).start()
