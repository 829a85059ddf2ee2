"""`dspark-cluster drain`: take replicas out of service; their requests end or go on elsewhere."""

from typing import Any

import ray

from actors.answers import answer_of
from actors.names import GATEWAY
from actors.session import session
from cluster.commands.terminal import messages
from cluster.errors import UserError
from cluster.serving.router import Drained

_MARGIN_S = 30.0
"""Beyond the grace period, for the last requests to be aborted there and moved."""


def drain(address: str | None, namespace: str, replicas: list[str], *, here: bool, grace_s: float | None) -> None:
    """Drain `replicas`, and with `here` those of this host. Returns when they run nothing.

    Raises:
        UserError: there is no cluster, or no such replica.
    """
    with messages.status("joins Ray") as status, session(address, namespace):
        try:
            gateway = ray.get_actor(GATEWAY)
        except ValueError:
            raise UserError("no gateway", "none serves in this Ray namespace", "name another by --namespace") from None
        hosts: dict[str, str] = answer_of(GATEWAY, gateway.replicas.remote())
        own = ray.util.get_node_ip_address()
        names = [*replicas, *(name for name, host in hosts.items() if here and host == own and name not in replicas)]
        if not names:
            messages.print("there is no replica on this host")
            return
        status.update(f"drains {', '.join(names)}")
        answers = {name: gateway.drain.remote(name, grace_s) for name in names}
        for name, answer in answers.items():
            _tell(name, answer_of(GATEWAY, answer, timeout_s=_longest(gateway, grace_s)))


def _longest(gateway: Any, grace_s: float | None) -> float:
    if grace_s is None:
        health = answer_of(GATEWAY, gateway.health.remote())
        grace_s = health.drain_grace_s if health is not None else 0.0
    return grace_s + _MARGIN_S


def _tell(name: str, drained: Drained) -> None:
    messages.print(f"{name} is drained: {drained.finished} requests ended there, {drained.moved} were moved")
