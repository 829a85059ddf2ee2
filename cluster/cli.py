"""The command line: options in, one function of `cluster.commands` called."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.terminal import DebugOption, JsonOption, command
from cluster.engine.cpu import profile

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding for vLLM with the draft model on GPUs of its own.",
)


class Placement(StrEnum):
    """Where the draft runs."""

    COLOCATED = "colocated"


@app.command()
@command
def generate(
    target: Annotated[str, typer.Option(help="Target model: a folder or a hub name.")],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model; without one the target decodes alone.")] = None,
    placement: Annotated[
        Placement, typer.Option(help="colocated: in the target's process, vLLM's own speculation.")
    ] = Placement.COLOCATED,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted a round (K); default: what the draft was trained for.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: if the model has one.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context to reserve; default: the model's.")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Answer one prompt: the text streams, a last line gives speed and acceptance."""
    # Here, not above: `--help` shall not wait for what generating needs.
    from cluster.commands.generate import GenerateOptions, read_prompt
    from cluster.commands.generate import generate as run
    from cluster.engine.settings import EngineSettings
    from cluster.models.draft import plan_speculation
    from cluster.models.folder import open_model

    text = read_prompt(prompt, prompt_file)
    model = open_model(target, role="target")
    speculation = None
    if draft is not None:
        speculation = plan_speculation(model, open_model(draft, role="draft"), num_speculative_tokens)
    settings = EngineSettings(target=model, speculation=speculation, max_model_len=max_model_len, max_num_seqs=1)
    options = GenerateOptions(
        prompt=text, chat=chat, max_tokens=max_tokens, temperature=temperature, seed=seed, json_output=json_output
    )
    run(settings, options)


@app.command()
@command
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = "What is the capital of France?",
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Ask SmolLM2-135M-Instruct, with speculative decoding: the first run fetches and converts it (93 MB)."""
    from cluster.commands.demo import demo as run

    run(prompt, json_output=json_output)


def main() -> None:
    """Entry point of `dspark-cluster`."""
    profile.activate()
    app()


if __name__ == "__main__":
    main()
