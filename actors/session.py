"""This process as a guest of a Ray cluster."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from actors.local_ray import LocalRay, find_local_ray, start_local_ray
from cluster.errors import UserError


@contextmanager
def session(
    address: str | None, namespace: str, *, start: bool = False, say: Callable[[str], None] = lambda _: None
) -> Iterator[LocalRay | None]:
    """Be joined to Ray within the block: to `address`, to RAY_ADDRESS, or to this machine's own, which `start` starts
    where there is none. The block gets the latter. A Ray that was started for a block that fails is stopped again.

    Raises:
        UserError: there is none, or it doesn't answer.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    local, started = None, None
    if address is None:
        local = find_local_ray()
        if local is None and start:
            say("starts Ray on this machine")
            local = started = start_local_ray()
        if local is None:
            raise UserError(
                "no cluster", "this machine has none", "start one with `dspark-cluster up`, or name one by --address"
            )
        address = local.address
        local.use_token()
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        _stop(started)
        why = " ".join(str(error).split())
        raise UserError(
            f"Ray at {address}", f"it can't be joined ({why})", "check the address, and its token"
        ) from error
    try:
        yield local
    except BaseException:
        ray.shutdown()
        _stop(started)
        raise
    ray.shutdown()


def _stop(started: LocalRay | None) -> None:
    if started is not None:
        started.stop()
