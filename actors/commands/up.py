"""`dspark-cluster up`: start a cluster, and say what becomes of it."""

import time
from collections.abc import Callable
from typing import Final

from rich.markup import escape

from actors.coordinator import PairView
from actors.session import session
from actors.up import up as start
from cluster.commands.terminal import messages
from cluster.config import ClusterConfig
from cluster.contract.contract import KVContract

_MUTUAL_TLS: Final = "--tls-ca CA --tls-certificate CERTIFICATE --tls-key KEY"


def up(config: ClusterConfig) -> None:
    """Start it; its address is the one line on standard output.

    Raises:
        UserError: it doesn't start; nothing of it is left then.
    """
    say = clock()
    with session(config.ray.address, config.ray.namespace, start=True, say=say):
        started = start(config, say)
    for index, pair in enumerate(started.pairs):
        messages.print(escape(describe_pair(index, pair)), soft_wrap=True)
    say("ready; `dspark-cluster status` looks at it, `dspark-cluster down` stops it; try")
    messages.print(f"  {escape(try_it(config, started.address))}", soft_wrap=True)
    print(started.address)


def try_it(config: ClusterConfig, address: str) -> str:
    """A command line that asks the cluster."""
    options = [f"--address {address}"]
    if config.gateway.token_file is not None:
        options.append(f"--token-file {config.gateway.token_file}")
    if config.gateway.tls is not None:
        options.append("--tls-ca CA" if config.gateway.tls.client_ca is None else _MUTUAL_TLS)
    return f'dspark-cluster generate {" ".join(options)} "Why is the sky blue?"'


def describe_pair(index: int, pair: PairView) -> str:
    """Its contract, in one line."""
    if not pair.contract:
        return f"pair {index}: no contract yet"
    contract = KVContract.from_json(pair.contract)
    groups = ", ".join(f"{group.role} {group.attention_backend} {group.dtype}" for group in contract.groups)
    return (
        f"pair {index}: epoch {pair.epoch}, contract {contract.digest[:16]}: {contract.wire.method}, "
        f"K = {contract.wire.num_speculative_tokens}, {contract.num_blocks:,} blocks; {groups}; "
        f"{len(contract.deviations)} deviations"
    )


def clock() -> Callable[[str], None]:
    """Says each step with the seconds since now."""
    begun = time.monotonic()

    def say(what: str) -> None:
        messages.print(f"{time.monotonic() - begun:5.0f} s  {escape(what)}", soft_wrap=True)

    return say
