"""The whole command line: `cluster.cli`'s commands, and those that need Ray.

Here, and not there, because nothing in `cluster` knows of actors. Ray is imported by the command that needs it.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from cluster.commands.generate_remote import RemoteOptions

__all__ = ["main"]

evaluations = typer.Typer(no_args_is_help=True, help="Accuracy with speculation and without.")
app.add_typer(evaluations, name="eval")

AddressOption = Annotated[
    str | None, typer.Option(help="Ray cluster to join, HOST:PORT; default: RAY_ADDRESS, or this machine's own.")
]
NamespaceOption = Annotated[str, typer.Option(help="Ray namespace of the cluster.")]

# Of commands that ask a server, whether it is named, found in Ray, or started for them.
ServerOption = Annotated[
    str | None, typer.Option(help="HOST:PORT of a server; default: the gateway of a cluster in Ray.")
]
ServersNamespaceOption = Annotated[
    str | None, typer.Option(help=f"Ray namespace of the cluster; default: {DEFAULT_NAMESPACE}.")
]
BorrowedClusterOption = Annotated[
    Path | None, typer.Option(help="YAML file of a cluster to start where there is none, and to stop at the end.")
]
PatienceOption = Annotated[
    float, typer.Option(min=1.0, help="Seconds in which a request is repeated while there is no room or no replica.")
]


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
    address: ServerOption = None,
    ray_address: AddressOption = None,
    namespace: ServersNamespaceOption = None,
    config: BorrowedClusterOption = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="For lines without max_tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="For lines without temperature.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For lines without seed.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; default: as many as the server runs.")
    ] = None,
    request_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds for each request.")] = None,
    patience: PatienceOption = 300.0,
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

    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = BatchOptions(
        input=input_,
        output=output,
        defaults={name: value for name, value in given.items() if value is not None},
        concurrency=concurrency,
        request_timeout_s=request_timeout,
        patience_s=patience,
    )
    access = _access(address, tls, tls_ca, tls_certificate, tls_key, token_file)
    run(options, _server(access, ray_address, namespace, config, output))


@evaluations.command()
@command
def gsm8k(
    data: Annotated[Path, typer.Option(help="GSM8K's JSONL file: question, and an answer behind ####.")],
    output: Annotated[
        Path, typer.Option(help="Folder for answers and results; one that is there is gone on with.")
    ] = Path("eval-gsm8k"),
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask by the chat template; default: after four worked examples.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, with speculation and without.")] = 0,
    min_accuracy: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="With speculation; below it the exit code is 1.")
    ] = None,
    min_acceptance_length: Annotated[
        float | None, typer.Option(min=1.0, help="Tokens a round; below it the exit code is 1.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Questions at once; default: as many as the server runs.")
    ] = None,
    patience: PatienceOption = 300.0,
    address: ServerOption = None,
    ray_address: AddressOption = None,
    namespace: ServersNamespaceOption = None,
    config: BorrowedClusterOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Exact-match accuracy on GSM8K with speculation and without, under the same seed, and acceptance length."""
    from cluster.commands.eval import EvalOptions, eval_gsm8k

    options = EvalOptions(
        data=data,
        output=output,
        limit=limit,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        patience_s=patience,
        min_accuracy=min_accuracy,
        min_acceptance_length=min_acceptance_length,
        json_output=json_output,
    )
    access = _access(address, tls, tls_ca, tls_certificate, tls_key, token_file)
    eval_gsm8k(options, _server(access, ray_address, namespace, config, output))


@app.command()
@command
def bench(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of the cluster, with a draft; default: the demo's pair.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for results and report; one that is there is gone on with.")
    ] = Path("bench"),
    dummy: Annotated[
        str | None,
        typer.Option(
            help="qwen3-8b, gemma4-12b or gemma4-12b-mtp: random weights of these dimensions, in the place of a pair."
        ),
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option(help="plain, colocated or separate; repeatable; default: all three.")
    ] = None,
    sizing: Annotated[
        str, typer.Option(help="equal: each arm has as many GPUs as the separate one; configured: as many replicas.")
    ] = "equal",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE in the place of the file's, such as pools.replicas=2.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE,VALUE of the config, such as model.num_speculative_tokens=2,4; repeatable."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once; repeatable; default: 1, 8 and 32.")
    ] = None,
    request_rate: Annotated[
        list[float] | None, typer.Option(min=1e-6, help="Requests a second; repeatable; default: all at once (inf).")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Shape of the gamma-distributed gaps at a rate; 1 is Poisson.")
    ] = 1.0,
    ramp_up: Annotated[float, typer.Option(min=0.0, help="Seconds until the full load.")] = 0.0,
    dataset: Annotated[
        str, typer.Option(help="bundled, random (tokens), or a JSONL file with turns, question, prompt or problem.")
    ] = "bundled",
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each run.")] = 64,
    num_warmups: Annotated[
        int | None, typer.Option(min=0, help="Before each run, not counted; default: as many as run at once.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 128,
    input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a random prompt (128), or the most that a text keeps of its end.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer is of --max-tokens.")] = False,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: if the model has one.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, gaps and sampling.")] = 0,
    repeats: Annotated[int, typer.Option(min=3, help="Of each cell, for a median and its spread.")] = 3,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Objective in ms, such as ttft:500, tpot:50, e2el:3000; repeatable.")
    ] = None,
    max_spread: Annotated[
        float, typer.Option(min=0.0, help="MAD of a cell's throughput by its median; above it is unstable.")
    ] = 0.05,
    max_lag: Annotated[
        float,
        typer.Option(min=0.0, help="Of the gap between messages: a generator that wakes later was the bottleneck."),
    ] = 0.25,
    request_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds for each request.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE to keep with the results.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of a server that is there, as it is: no arms.")] = None,
    ray_address: AddressOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare plain decoding, a colocated draft and a separate one under the same load, at equal GPUs."""
    from cluster.bench.load.prompts import RANDOM_NAME, Shape, read_dataset
    from cluster.bench.measures import parse_goodput
    from cluster.bench.sweep.arms import Variant, parse_arms, parse_sizing
    from cluster.bench.sweep.plan import BenchPlan, make_variants, parse_metadata
    from cluster.commands.bench import BenchOutput, demo_pair, dummy_pair, existing_server
    from cluster.commands.bench import bench as run

    access = _access(address, tls, tls_ca, tls_certificate, tls_key, token_file)
    concurrencies = tuple(concurrency or ((1, 8, 32) if request_rate is None else (None,)))
    if address is not None:
        own: dict[str, Any] = {"CONFIG": config, "--arm": arm, "--set": set_, "--sweep": sweep, "--dummy": dummy}
        refuse_beside("--address", own | {"--ray-address": ray_address})
        variants: tuple[Variant, ...] = (Variant(arm="server", settings={}, config=None),)
    else:
        flags = [*map(parse_override, set_ or ())]
        if dummy is not None:
            flags = [*dummy_pair(dummy, concurrencies), *flags]
        elif config is None and all(flag.path != "model.target" for flag in flags):
            flags = [*demo_pair(concurrencies), *flags]
        if ray_address is not None:
            flags.append(Override(path="ray.address", value=ray_address, flag=f"--ray-address {ray_address}"))
        variants = make_variants(config, flags, sweep or (), parse_arms(arm), parse_sizing(sizing))
    plan = BenchPlan(
        variants=variants,
        concurrencies=concurrencies,
        request_rates=tuple(request_rate or (math.inf,)),
        repeats=repeats,
        dataset=read_dataset(dataset),
        shape=Shape(
            num_prompts=num_prompts,
            num_warmups=num_warmups,
            max_tokens=max_tokens,
            input_tokens=input_tokens or (128 if dataset == RANDOM_NAME else None),
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
            chat=chat,
        ),
        burstiness=burstiness,
        ramp_up_s=ramp_up,
        request_timeout_s=request_timeout,
        goodput=parse_goodput(goodput or ()),
        max_spread=max_spread,
        max_lag_share=max_lag,
        metadata=parse_metadata(metadata or ()),
        address=address,
    )
    where = BenchOutput(folder=output, json_output=json_output)
    if address is not None:
        run(plan, where, lambda _: existing_server(access))
        return
    from actors.bench_cluster import bench_cluster
    from actors.commands.borrow import warn_of_rays_copy

    warn_of_rays_copy(output)
    run(plan, where, lambda variant: bench_cluster(variant, access))


def _access(
    address: str | None,
    tls: bool,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
) -> "RemoteOptions":
    """How a server is asked; without an address, one that is still to be found."""
    from cluster.commands.generate_remote import RemoteOptions

    return RemoteOptions(
        address=address or "",
        tls=tls,
        tls_ca=tls_ca,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        token_file=token_file,
    )


def _server(
    access: "RemoteOptions", ray_address: str | None, namespace: str | None, config: Path | None, output: Path
) -> Callable[[], AbstractContextManager["RemoteOptions"]]:
    """Whom a command asks: the server of `access`, if it names one, else the cluster in Ray, or one out of `config`."""
    if access.address:
        refuse_beside("--address", {"--ray-address": ray_address, "--namespace": namespace, "--config": config})
        return lambda: nullcontext(access)
    from actors.commands.borrow import gateway, warn_of_rays_copy

    warn_of_rays_copy(output)
    cluster = None
    if config is not None:
        refuse_beside("--config", {"--ray-address": ray_address, "--namespace": namespace})
        cluster = load_config(config)
        ray_address, namespace = cluster.ray.address, cluster.ray.namespace
    return lambda: gateway(ray_address, namespace or DEFAULT_NAMESPACE, access, config=cluster)


if __name__ == "__main__":
    main()
