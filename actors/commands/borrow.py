"""Whom a command asks: the cluster of a Ray, or one of its own for as long as it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import ray
from rich.markup import escape

from actors.answers import ask_health
from actors.commands.down import down
from actors.commands.up import clock, describe_pair
from actors.gateway import GatewayHealth
from actors.names import GATEWAY
from actors.session import session
from actors.up import up
from cluster.commands.generate_remote import RemoteOptions
from cluster.commands.terminal import messages
from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.serving.settings import ListenSettings

_RAYS_COPIES: Final = "working_dir_files"
"""The folder of Ray's session that has the copies of `ray job submit --working-dir`."""


@contextmanager
def gateway(
    address: str | None, namespace: str, access: RemoteOptions, *, config: ClusterConfig | None
) -> Iterator[RemoteOptions]:
    """The gateway of the cluster in that Ray namespace, with `access`. Where there is none, one is started from
    `config`, and stopped when the block ends.

    Raises:
        UserError: there is no cluster and no config, or none can be reached or started.
    """
    own, say = False, clock()
    try:
        with session(address, namespace, start=config is not None, say=say):
            found: GatewayHealth | None = ask_health(GATEWAY)
            if found is not None:
                server = _reachable(found)
            elif config is not None:
                started = up(config, say)
                for index, pair in enumerate(started.pairs):
                    messages.print(escape(describe_pair(index, pair)), soft_wrap=True)
                server = started.address
                access = replace(access, token_file=access.token_file or config.gateway.token_file)
                own = True
            else:
                raise UserError(
                    "no cluster",
                    f"none serves in Ray namespace {namespace}",
                    "start one with `dspark-cluster up`, or give --config to start one for this command",
                )
        yield replace(access, address=server)
    finally:
        if own:
            down(address, namespace)


def _reachable(found: GatewayHealth) -> str:
    host, _, _ = found.address.rpartition(":")
    here = ray.util.get_node_ip_address()
    if found.host != here and ListenSettings(host=host.strip("[]")).is_loopback:
        raise UserError(
            f"gateway {found.address}",
            f"it listens on the loopback of {found.host} alone, and this is {here}",
            "run the batch there, or let it listen on another gateway.host",
        )
    return found.address


def warn_of_rays_copy(output: Path) -> None:
    """Say where an output goes that a job of Ray writes into its copy of the working directory."""
    if not output.is_absolute() and _RAYS_COPIES in Path.cwd().parts:
        said = (
            f"{output.absolute()} is in Ray's copy of the working directory, which ends with it; give --output in full"
        )
        messages.print(escape(said), soft_wrap=True)
