"""The whole command line: `cluster.cli`'s commands, and those that need Ray.

Here, and not there, because nothing in `cluster` knows of actors. Ray is imported by the command that needs it.
"""

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import app, main
from cluster.commands.terminal import DebugOption, JsonOption, command
from cluster.config import DEFAULT_NAMESPACE, Override, load_config, parse_override

__all__ = ["main"]

AddressOption = Annotated[
    str | None, typer.Option(help="Ray cluster to join, HOST:PORT; default: RAY_ADDRESS, or this machine's own.")
]
NamespaceOption = Annotated[str, typer.Option(help="Ray namespace of the cluster.")]


@app.command()
@command
def up(
    config: Annotated[Path | None, typer.Argument(help="YAML file of the cluster; examples/ has some.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model: a folder or a hub name.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, likewise.")] = None,
    address: AddressOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE in the place of the file's, such as pools.replicas=2.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Start a cluster: coordinator, target replicas, draft workers, gateway. Its address is printed when it serves."""
    from actors.commands.up import up as run

    flags = {"target": ("model.target", target), "draft": ("model.draft", draft), "address": ("ray.address", address)}
    overrides = [
        Override(path=path, value=value, flag=f"--{name} {value}")
        for name, (path, value) in flags.items()
        if value is not None
    ]
    run(load_config(config, [*overrides, *map(parse_override, set_ or ())]))


@app.command()
@command
def status(
    address: AddressOption = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until interrupted.")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a cluster's actors, nodes, contracts, requests and acceptance."""
    from actors.commands.status import status as run

    run(address, namespace, watch=watch, json_output=json_output)


@app.command()
@command
def down(
    address: AddressOption = None, namespace: NamespaceOption = DEFAULT_NAMESPACE, debug: DebugOption = False
) -> None:
    """Stop a cluster, and the Ray that `up` started for it: nothing of it stays."""
    from actors.commands.down import down as run

    run(address, namespace)


if __name__ == "__main__":
    main()
