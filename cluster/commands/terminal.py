"""What the commands share: messages on standard error, quiet libraries, errors that a user can mend."""

import functools
import os
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from cluster.errors import UserError

# Text goes to standard output, everything about it to standard error: a pipe gets the text alone.
messages = Console(stderr=True, highlight=False)

_FILE_WIDTH: Final = 160

DebugOption = Annotated[bool, typer.Option("--debug", help="Show vLLM's log and, for an error, where it arose.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command that has a `debug` parameter: set up logging, and end a UserError in one line, exit code 2."""

    @functools.wraps(function)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        _set_log_levels(debug)
        try:
            function(*args, debug=debug, **kwargs)
        except UserError as error:
            if debug:
                messages.print_exception()
            messages.print(f"dspark-cluster: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error

    return run


def output() -> Console:
    """Standard output for tables: those in a file or a pipe aren't cut to a terminal's width."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_FILE_WIDTH)


def _set_log_levels(debug: bool) -> None:
    # Read once, when vLLM and torch are imported; a level that the user has set stays.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if debug else "ERROR")
    if not debug:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
