"""The command line: options in, one function of `cluster.commands` called."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.commands.terminal import DebugOption, JsonOption, command
from cluster.engine.cpu import profile
from cluster.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding for vLLM with the draft model on GPUs of its own.",
)


AttentionBackendOption = Annotated[
    str, typer.Option(help="Of the draft: inherit (the target's), auto (select again), or a backend's name.")
]
KVCacheDtypeOption = Annotated[str, typer.Option(help="Of the draft: inherit, auto, or a dtype's name.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse whatever deviates from the target.")]

# What a server asks of its clients.
TlsOption = Annotated[bool, typer.Option("--tls", help="Of the server: its authority is one the system knows.")]
TlsCaOption = Annotated[Path | None, typer.Option(help="The authority that signed the server's certificate.")]
TlsCertificateOption = Annotated[Path | None, typer.Option(help="Your certificate, for mutual TLS.")]
TlsKeyOption = Annotated[Path | None, typer.Option(help="Its key.")]
TokenFileOption = Annotated[Path | None, typer.Option(help="The file that holds the server's token.")]


class Placement(StrEnum):
    """Where the draft runs."""

    COLOCATED = "colocated"
    SEPARATE = "separate"


@app.command()
@command
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model: a folder or a hub name.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model; without one the target decodes alone.")] = None,
    placement: Annotated[
        Placement,
        typer.Option(help="colocated: in the target's process, vLLM's own speculation; separate: in its own process."),
    ] = Placement.COLOCATED,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted a round (K); default: what the draft was trained for.")
    ] = None,
    attention_backend: AttentionBackendOption = "inherit",
    kv_cache_dtype: KVCacheDtypeOption = "inherit",
    strict: StrictOption = False,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: if the model has one.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context to reserve; default: the model's.")] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a server that answers, instead of --target.")
    ] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace of all processes to this file; ui.perfetto.dev opens it.")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer one prompt: the text streams, a last line gives speed and acceptance."""
    # Here, not above: `--help` shall not wait for what generating needs.
    from cluster.commands.generate import GenerateOptions, read_prompt
    from cluster.commands.generate import generate as run
    from cluster.commands.generate_remote import RemoteOptions, generate_remote
    from cluster.contract.policy import Policy
    from cluster.engine.settings import EngineSettings
    from cluster.models.draft import plan_speculation
    from cluster.models.folder import open_model

    policy = Policy(attention_backend=attention_backend, kv_cache_dtype=kv_cache_dtype, strict=strict)
    if placement is Placement.COLOCATED and policy != Policy():
        raise UserError(
            "--attention-backend, --kv-cache-dtype or --strict",
            "they are for the contract between two processes, and there is one",
            "add --placement separate, or leave them out",
        )
    options = GenerateOptions(
        prompt=read_prompt(prompt, prompt_file),
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        json_output=json_output,
        profile=profile,
    )
    server = {"--tls": tls or None, "--tls-ca": tls_ca, "--tls-certificate": tls_certificate, "--tls-key": tls_key}
    if address is not None:
        own: dict[str, Any] = {"--target": target, "--draft": draft, "--num-speculative-tokens": num_speculative_tokens}
        own |= {"--max-model-len": max_model_len, "--profile": profile}
        own |= {"--placement": placement if placement is Placement.SEPARATE else None}
        refuse_beside("--address", own)
        remote = RemoteOptions(
            address=address,
            tls=tls,
            tls_ca=tls_ca,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            token_file=token_file,
        )
        generate_remote(remote, options)
        return
    if target is None:
        raise UserError("no model", "there is nothing to answer with", "name --target, or --address of a server")
    refuse_beside("--target", server | {"--token-file": token_file})
    model = open_model(target, role="target")
    speculation = None
    if draft is not None:
        speculation = plan_speculation(model, open_model(draft, role="draft"), num_speculative_tokens)
    settings = EngineSettings(target=model, speculation=speculation, max_model_len=max_model_len, max_num_seqs=1)
    run(settings, options, separate=policy if placement is Placement.SEPARATE else None)


@app.command()
@command
def serve(
    target: Annotated[str, typer.Option(help="Target model: a folder or a hub name.")],
    draft: Annotated[str | None, typer.Option(help="Draft model; without one the target decodes alone.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted a round (K); default: what the draft was trained for.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context to reserve; default: the model's.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Choices that run at once; more wait.")] = 16,
    max_queued: Annotated[int, typer.Option(min=0, help="Choices that wait; more are refused.")] = 256,
    host: Annotated[str, typer.Option(help="Where to listen; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 50051,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics on --host, at /metrics.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="The server's certificate; turns TLS on.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Clients need a certificate that this signed.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="The file with the token that every call needs.")] = None,
    debug: DebugOption = False,
) -> None:
    """Serve a target, with or without a draft in its process, over gRPC."""
    from cluster.commands.serve import serve as run
    from cluster.engine.settings import EngineSettings
    from cluster.models.draft import plan_speculation
    from cluster.models.folder import open_model
    from cluster.serving.limits import Limits
    from cluster.serving.settings import ServerSettings, read_token, tls_settings

    listening = ServerSettings(
        host=host,
        port=port,
        metrics_host=host,
        metrics_port=metrics_port,
        tls=tls_settings(tls_certificate, tls_key, tls_client_ca),
        token=None if token_file is None else read_token(token_file),
        limits=Limits(max_running=max_running, max_queued=max_queued),
    )
    model = open_model(target, role="target")
    speculation = None
    if draft is not None:
        speculation = plan_speculation(model, open_model(draft, role="draft"), num_speculative_tokens)
    settings = EngineSettings(
        target=model, speculation=speculation, max_model_len=max_model_len, max_num_seqs=max_running
    )
    run(settings, listening)


@app.command()
@command
def plan(
    target: Annotated[str | None, typer.Option(help="Target model: a folder or a hub name; no weights needed.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model, likewise.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted a round (K); default: what the draft was trained for.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context to reserve; default: the model's.")] = None,
    attention_backend: AttentionBackendOption = "inherit",
    kv_cache_dtype: KVCacheDtypeOption = "inherit",
    strict: StrictOption = False,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, help="GiB of each GPU to plan for; default: the memory here.")
    ] = None,
    facts: Annotated[
        list[Path] | None, typer.Option(help="Facts of one side, saved elsewhere; twice for both sides.")
    ] = None,
    save_facts: Annotated[
        Path | None, typer.Option(help="Write the facts into this folder, target.json and draft.json.")
    ] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Negotiate the KV contract of a pair without loading it, and say what it takes of a GPU."""
    from cluster.commands.plan import PlanOptions, read_facts
    from cluster.commands.plan import plan as run
    from cluster.contract.policy import Policy
    from cluster.engine.settings import EngineSettings
    from cluster.models.draft import plan_speculation
    from cluster.models.folder import open_model

    options = PlanOptions(
        policy=Policy(attention_backend=attention_backend, kv_cache_dtype=kv_cache_dtype, strict=strict),
        gpu_bytes=None if gpu_memory is None else int(gpu_memory * (1 << 30)),
        save_facts=save_facts,
        json_output=json_output,
        show_log=debug,
    )
    settings = None
    if target is not None and draft is not None:
        model = open_model(target, role="target", weights=False)
        drafting = plan_speculation(model, open_model(draft, role="draft", weights=False), num_speculative_tokens)
        settings = EngineSettings(target=model, speculation=drafting, max_model_len=max_model_len)
    run(settings, read_facts(facts or ()), options)


@app.command()
@command
def train_draft(
    target: Annotated[str, typer.Option(help="Target model: a folder or a hub name.")],
    output: Annotated[Path, typer.Option(help="Folder for the draft; a stopped run into it is resumed.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL of your prompts (turns, question or prompt); repeatable.")
    ] = None,
    evaluate: Annotated[
        list[Path] | None, typer.Option(help="JSONL of questions to measure on, never trained on; repeatable.")
    ] = None,
    evaluate_limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions of each file.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Bundled and target-written prompts.")] = 60_000,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest answer.")] = 320,
    max_length: Annotated[int, typer.Option(min=16, help="The longest prompt and answer together.")] = 640,
    sampled: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of answers at temperature 1; the others are greedy.")
    ] = 0.1,
    engines: Annotated[
        int, typer.Option(min=1, help="Engines side by side that make the answers: a CPU core bounds a small target's.")
    ] = 1,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the draft.")] = 3,
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="Of the draft's MLPs; default: the target's.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens drafted a round (K).")] = 7,
    markov_rank: Annotated[int, typer.Option(min=1, help="Rank of the Markov head.")] = 32,
    auxiliary_layers: Annotated[int, typer.Option(min=1, help="Target layers whose states the draft reads.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 8_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 64,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks of each sequence.")] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Its peak.")] = 1.5e-3,
    seed: Annotated[int, typer.Option(help="Of prompts, weights, order and anchors.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Every stage, in tiny sizes.")] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a DSpark draft for a target on its own answers, and measure its acceptance."""
    from cluster.commands.train import TrainOptions
    from cluster.commands.train import train_draft as run

    options = TrainOptions(
        target=target,
        output=output,
        prompts=tuple(prompts or ()),
        evaluate=tuple(evaluate or ()),
        evaluate_limit=evaluate_limit,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        max_length=max_length,
        sampled=sampled,
        engines=engines,
        num_layers=num_layers,
        intermediate_size=intermediate_size,
        block_size=block_size,
        markov_rank=markov_rank,
        auxiliary_layers=auxiliary_layers,
        steps=steps,
        batch_size=batch_size,
        anchors=anchors,
        learning_rate=learning_rate,
        seed=seed,
        json_output=json_output,
    )
    run(options.tiny() if dry_run else options)


def refuse_beside(option: str, others: dict[str, Any]) -> None:
    """Raise UserError for the first of `others` that is given: beside `option` it would do nothing."""
    for other, value in others.items():
        if value is not None:
            raise UserError(f"{other} beside {option}", "it would do nothing", "leave one of them out")


def main() -> None:
    """Entry point of `dspark-cluster`."""
    profile.activate()
    app()


if __name__ == "__main__":
    main()
