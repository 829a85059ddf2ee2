"""The whole command line: `cluster.cli`'s commands, and those that need Ray.

Here, and not there, because nothing in `cluster` knows of actors. Ray is imported by the command that needs it.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import (
    TlsCaOption,
    TlsCertificateOption,
    TlsKeyOption,
    TlsOption,
    TokenFileOption,
    app,
    main,
    refuse_beside,
)
from cluster.commands.terminal import DebugOption, JsonOption, command
from cluster.config import DEFAULT_NAMESPACE, Override, load_config, parse_override
from cluster.errors import UserError

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


@app.command()
@command
def drain(
    replicas: Annotated[list[str] | None, typer.Argument(help="Replicas by name, such as target-0.")] = None,
    here: Annotated[bool, typer.Option("--here", help="Those of this host: for a node that is to go.")] = False,
    grace: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds for running requests; default: the gateway's drain_grace_s.")
    ] = None,
    address: AddressOption = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    debug: DebugOption = False,
) -> None:
    """Take replicas out of service: no new requests at once, running ones end within the grace period or are moved."""
    from actors.commands.drain import drain as run

    if not replicas and not here:
        raise UserError("nothing to drain", "no replica is named", "name some, or give --here")
    run(address, namespace, replicas or [], here=here, grace_s=grace)


@app.command()
@command
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = "What is the capital of France?",
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Start a small cluster here, ask SmolLM2-135M-Instruct with its draft, stop it. First run: 93 MB to fetch."""
    from actors.commands.demo import demo as run

    run(prompt, json_output=json_output)


@app.command()
@command
def batch(
    input_: Annotated[Path, typer.Option("--input", help="JSONL file of requests, one a line.")],
    output: Annotated[Path, typer.Option(help="JSONL file of answers; one that is there is gone on with.")],
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a server; default: the gateway of a cluster in Ray.")
    ] = None,
    ray_address: AddressOption = None,
    namespace: Annotated[
        str | None, typer.Option(help=f"Ray namespace of the cluster; default: {DEFAULT_NAMESPACE}.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of a cluster to start where there is none, and to stop at the end.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="For lines without max_tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="For lines without temperature.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For lines without seed.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; default: as many as the server runs.")
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds for each request.")] = None,
    patience: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds in which a request is repeated while there is no room or no replica."),
    ] = 300.0,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    debug: DebugOption = False,
) -> None:
    """Answer every line of a file. Exit code 0: all have their answers; 1: some failed; 2: something is wrong."""
    from cluster.commands.batch import BatchOptions
    from cluster.commands.batch import batch as run
    from cluster.commands.generate_remote import RemoteOptions

    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = BatchOptions(
        input=input_,
        output=output,
        defaults={name: value for name, value in given.items() if value is not None},
        concurrency=concurrency,
        request_timeout_s=request_timeout,
        patience_s=patience,
    )
    access = RemoteOptions(
        address=address or "",
        tls=tls,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        token_file=token_file,
    )
    if address is not None:
        refuse_beside("--address", {"--ray-address": ray_address, "--namespace": namespace, "--config": config})
        run(options, lambda: nullcontext(access))
        return
    from actors.commands.borrow import gateway, warn_of_rays_copy

    warn_of_rays_copy(output)
    cluster = None
    if config is not None:
        refuse_beside("--config", {"--ray-address": ray_address, "--namespace": namespace})
        cluster = load_config(config)
        ray_address, namespace = cluster.ray.address, cluster.ray.namespace
    run(options, lambda: gateway(ray_address, namespace or DEFAULT_NAMESPACE, access, config=cluster))


if __name__ == "__main__":
    main()
