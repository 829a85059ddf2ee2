"""`dspark-cluster down`: stop a cluster, and the Ray that was started for it."""

import ray

from actors.down import down as stop
from actors.session import session
from cluster.commands.terminal import messages


def down(address: str | None, namespace: str) -> None:
    """Stop it. Raises UserError where there is no Ray to ask."""
    with messages.status("joins Ray") as status, session(address, namespace) as local:
        names = stop(status.update)
        others = _others(namespace)
    if local is not None and not others:
        with messages.status("stops this machine's Ray"):
            local.stop()
    messages.print(f"stopped {', '.join(names)}" if names else "there was no cluster")


def _others(namespace: str) -> list[str]:
    """Actors of other clusters in the same Ray."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in named if each["namespace"] != namespace]
