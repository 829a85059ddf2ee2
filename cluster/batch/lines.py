"""A batch's input: one JSON object a line, each a request, all of them right or none.

A line has one prompt (`prompt`, `messages` or `token_ids`), perhaps an `id`, and any of the API's other fields by their
names: those of sampling, stopping and output directly, `structured_output` and `speculation` as objects.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.client import (
    ChatMessage,
    ChatPrompt,
    OutputOptions,
    Request,
    Sampling,
    SpeculationOptions,
    Stopping,
    StructuredOutput,
    TextPrompt,
    TokenPrompt,
)
from cluster.contract.codec import from_plain, parse
from cluster.contract.errors import DocumentError, UnknownKey
from cluster.errors import UserError
from cluster.serving.types import Prompt
from cluster.serving.wire import encode_request

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request. `index` counts the file's lines from 0."""

    index: int
    id: str | None
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """A whole file. `digest` is the SHA-256 of its bytes."""

    file: Path
    digest: str
    lines: tuple[BatchLine, ...]

    def wrong(self, line: BatchLine, why: str) -> UserError:
        """That a line can't be run."""
        return UserError(_place(self.file, line.index), why, "change the line")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """A line's fields that aren't flattened."""

    id: str | None = None
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    add_generation_prompt: bool | None = None
    structured_output: StructuredOutput | None = None
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


_KINDS: Final = (_Own, Sampling, Stopping, OutputOptions)
_KNOWN: Final = tuple(name for kind in _KINDS for name in _names(kind))


def read_input(file: Path, defaults: Mapping[str, Any]) -> BatchInput:
    """The file's requests, `defaults` in the place of fields that a line leaves out. Blank lines are passed over.

    Raises:
        UserError: the file can't be read, has no request, or a line isn't one; with the line's number, from 1.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"input {file}", f"it can't be read ({error.strerror})", "check its path") from error
    lines = []
    place_of: dict[str, str] = {}
    for index, text in enumerate(content.split(b"\n")):
        if not text.strip():
            continue
        place = _place(file, index)
        try:
            line = _read_line(index, text, defaults)
        except DocumentError as error:
            raise error.at(place) from error
        if line.id is not None and line.id in place_of:
            raise UserError(f"{place}: id {line.id!r}", f"{place_of[line.id]} has it too", "give each line its own")
        if line.id is not None:
            place_of[line.id] = place
        lines.append(line)
    if not lines:
        raise UserError(f"input {file}", "there is no request in it", 'write one a line, such as {"prompt": "Hello"}')
    return BatchInput(file=file, digest=hashlib.sha256(content).hexdigest(), lines=tuple(lines))


def _read_line(index: int, text: bytes, defaults: Mapping[str, Any]) -> BatchLine:
    plain = {**defaults, **parse(text)}
    for key in plain:
        if key not in _KNOWN:
            raise UnknownKey(key, _KNOWN)
    own = _part(_Own, plain)
    request = Request(
        prompt=_prompt(own),
        sampling=_part(Sampling, plain),
        stopping=_part(Stopping, plain),
        output=_part(OutputOptions, plain),
        structured_output=own.structured_output,
        speculation=own.speculation,
        truncate_prompt_tokens=own.truncate_prompt_tokens,
        priority=own.priority,
        cache_salt=own.cache_salt,
    )
    try:
        encode_request(request)
    except (ValueError, OverflowError) as error:  # a negative count, half a surrogate pair
        raise DocumentError("", f"not a request ({error})", "of values that the API's fields can hold") from error
    return BatchLine(index=index, id=own.id, request=request)


def _part(kind: type[T], plain: Mapping[str, Any]) -> T:
    return from_plain(kind, {name: plain[name] for name in _names(kind) if name in plain})


def _prompt(own: _Own) -> Prompt:
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(own, name) is not None]
    if len(given) != 1:
        found = f"a line with {' and '.join(given)}" if given else "a line without a prompt"
        raise DocumentError("", found, "one with prompt, messages or token_ids")
    if own.messages is not None:
        return ChatPrompt(messages=own.messages, add_generation_prompt=own.add_generation_prompt)
    if own.add_generation_prompt is not None:
        raise DocumentError("add_generation_prompt", "given without messages", "left out")
    if own.token_ids is not None:
        return TokenPrompt(token_ids=own.token_ids)
    assert own.prompt is not None
    return TextPrompt(text=own.prompt)


def _place(file: Path, index: int) -> str:
    return f"{file}, line {index + 1}"
