"""Requests and responses of the generation API as Python sees them; None is what the wire calls unset.

Server and client share them: the client encodes what the server decodes (`wire`), the server checks it (`validate`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from cluster.speculation.figures import AcceptanceFigures

Role = Literal["system", "user", "assistant", "tool", "developer"]
StructuredKind = Literal["json_schema", "regex", "grammar", "choice", "json_object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text, tokenized with the model's special tokens."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Tokens, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages, rendered by the model's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool | None = None


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn, by vLLM's names."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When generation ends."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_string: bool | None = None
    ignore_eos: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is returned beside text and tokens."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the output must look like. `texts` is for `choice`, `text` for the others but `json_object`."""

    kind: StructuredKind
    text: str = ""
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding of one request."""

    enabled: bool | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one prompt. An empty `request_id` lets the server choose."""

    prompt: Prompt
    request_id: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    output: OutputOptions = field(default_factory=OutputOptions)
    structured_output: StructuredOutput | None = None
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class FinishReason(StrEnum):
    """Why a choice ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log probability; rank 1 is the most probable."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log probabilities at one position: of the token that stands there, and of the most probable ones."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """Speculation of one choice, over some rounds. Steps without a draft have nothing to verify."""

    acceptance: AcceptanceFigures
    rounds_without_draft: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one choice gained. `finish_reason` is set on its last delta; `matched_stop` with a stop string or token."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    speculation: RoundFigures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What was generated since the last response. `seed` and `prompt_logprobs` are in the first one."""

    request_id: str
    choices: tuple[ChoiceDelta, ...]
    usage: Usage
    seed: int | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
