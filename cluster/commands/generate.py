"""`dspark-cluster generate`: one prompt, answered by a target with or without a draft."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.channel.base import ChannelKind
from cluster.commands.terminal import messages
from cluster.contract.policy import Policy
from cluster.engine.cpu import profile
from cluster.engine.in_process import GenerationDelta, GenerationRequest, InProcessEngine, join_deltas
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.engine.tracing import enable_ranges, join_traces, traced
from cluster.errors import UserError
from cluster.models.prompt import encode_prompt
from cluster.speculation.figures import AcceptanceFigures
from cluster.speculation.rounds import RoundTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to sample. `chat` None follows the model: its chat template where it has one."""

    prompt: str
    chat: bool | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    json_output: bool = False
    profile: Path | None = None
    """The file for a trace of what the engines do for the answer."""

    def __post_init__(self) -> None:
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:  # a shell's arguments may be any bytes
            raise _not_utf8(error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """The answer and its figures. `seconds` runs from the request to its last token, loading left out."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_prompt_tokens: int
    seconds: float
    seed: int | None
    acceptance: AcceptanceFigures | None
    rounds: RoundTimes | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "seed": self.seed,
            "speculation": self.acceptance.to_json() if self.acceptance else None,
            "rounds": asdict(self.rounds) if self.rounds else None,
        }

    def summary(self) -> str:
        line = f"{len(self.token_ids)} tokens in {self.seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s"
        if self.acceptance is None:
            return line
        by_position = " ".join(f"{rate:.0%}" for rate in self.acceptance.rate_by_position)
        line = (
            f"{line}; acceptance length {self.acceptance.acceptance_length:.2f} over {self.acceptance.rounds} rounds, "
            f"accepted by position {by_position}"
        )
        return f"{line}\n{self._round()}" if self.rounds is not None and self.rounds.rounds else line

    def _round(self) -> str:
        """The price of the split, an average round in milliseconds and bytes."""
        assert self.rounds is not None
        times, count = self.rounds, self.rounds.rounds
        step = self.seconds - times.fuse - times.split - times.draft
        parts = {
            "target step": step,
            "fuse": times.fuse,
            "encode": times.encode,
            "transfer": times.transfer,
            "draft": times.draft,
            "decode": times.decode,
        }
        shown = ", ".join(f"{name} {1e3 * seconds / count:.2f}" for name, seconds in parts.items())
        return f"ms a round: {shown}; {times.request_bytes // count:,} bytes out, {times.reply_bytes // count:,} back"


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input (`-`, or nothing given and a pipe).

    Raises UserError when there is none, or two, or the file can't be read.
    """
    if argument is not None and argument != "-" and file is not None:
        raise UserError("two prompts", "one is an argument and one a file", "give one of them")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"prompt file {file}", f"it can't be read ({error})", "check its path and encoding"
            ) from error
    if argument is not None and argument != "-":
        return argument
    if sys.stdin.isatty():
        raise UserError(
            "no prompt", "there is none to answer", "give it as an argument, by --prompt-file, or by a pipe"
        )
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from error


def _not_utf8(error: UnicodeError) -> UserError:
    return UserError("the prompt", f"it isn't UTF-8 ({error})", "give it in that encoding")


def generate(settings: EngineSettings, options: GenerateOptions, *, separate: Policy | None = None) -> GenerateResult:
    """Answer the prompt, streaming the text to standard output and the figures to standard error.

    `separate` puts the draft into a process of its own, under a KV contract of this policy.

    Raises UserError for a prompt or settings that can't work, before weights are loaded where that can be known.
    """
    result = answer(settings, options, separate=separate, stream=not options.json_output)
    if options.json_output:
        print(json.dumps(result.to_json()))
    else:
        messages.print(result.summary(), style="dim", soft_wrap=True)
    return result


def answer(
    settings: EngineSettings, options: GenerateOptions, *, stream: bool, separate: Policy | None = None
) -> GenerateResult:
    """Answer the prompt with an engine of its own; `stream` prints the text as it comes. Raises as `generate`."""
    prompt = encode_prompt(settings.target, options.prompt, chat=options.chat, context_length=settings.context_length)
    request = GenerationRequest(
        prompt_token_ids=prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    with _parts_of_trace(options.profile) as (target_trace, draft_trace):
        with messages.status(f"loading {settings.target.name}"):
            if separate is not None:
                channel: ChannelKind = "shm" if profile.is_cpu_installation() else "cuda_ipc"
                engine: InProcessEngine = SeparateEngine(
                    settings, policy=separate, channel=channel, draft_trace=draft_trace
                )
            else:
                engine = InProcessEngine(settings)
        with engine, traced(target_trace, "target"):
            return _run(engine, request, stream=stream)


@contextmanager
def _parts_of_trace(profile: Path | None) -> Iterator[tuple[Path | None, Path | None]]:
    """Where the target and the draft leave theirs, which `profile` is made of at the end."""
    if profile is None:
        yield None, None
        return
    try:
        profile.touch()
    except OSError as error:
        raise UserError(f"--profile {profile}", f"it can't be written ({error})", "name another file") from error
    enable_ranges()
    with tempfile.TemporaryDirectory(prefix="dspark-trace-") as folder:
        parts = Path(folder) / "target.json", Path(folder) / "draft.json"
        yield parts
        join_traces([part for part in parts if part.exists()], profile)
    messages.print(f"the trace is in {profile}; https://ui.perfetto.dev opens it", style="dim", soft_wrap=True)


def _run(engine: InProcessEngine, request: GenerationRequest, *, stream: bool) -> GenerateResult:
    start = time.perf_counter()
    deltas: list[GenerationDelta] = []
    for delta in engine.stream([request]):
        deltas.append(delta)
        if stream:
            print(delta.text, end="", flush=True)
    seconds = time.perf_counter() - start
    if stream:
        print(flush=True)
    completion = join_deltas(deltas)
    return GenerateResult(
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        num_prompt_tokens=len(request.prompt_token_ids),
        seconds=seconds,
        seed=request.seed,
        acceptance=completion.acceptance,
        rounds=engine.speculator.times if isinstance(engine, SeparateEngine) else None,
    )
