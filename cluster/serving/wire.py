"""Between the protocol's messages and `types`: the only module that knows both."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dspark.v1 import generation_pb2 as pb

from cluster.serving.types import (
    ChatMessage,
    ChatPrompt,
    ChoiceDelta,
    FinishReason,
    OutputOptions,
    PositionLogprobs,
    Prompt,
    Request,
    Response,
    Role,
    RoundFigures,
    Sampling,
    SpeculationOptions,
    Stopping,
    StructuredOutput,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
)
from cluster.speculation.figures import AcceptanceFigures

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROLES: dict[pb.ChatRole.ValueType, Role] = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
    pb.CHAT_ROLE_DEVELOPER: "developer",
}
_ROLE_NUMBERS = {role: number for number, role in ROLES.items()}

_FINISH_REASONS = {
    pb.FINISH_REASON_END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    pb.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    pb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}
_FINISH_NUMBERS = {reason: number for number, reason in _FINISH_REASONS.items()}


def encode_request(request: Request) -> pb.GenerateRequest:
    """What a client sends. Raises ValueError or TypeError for a value that the field's type can't hold."""
    message = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=encode_sampling(request.sampling),
        stopping=pb.StoppingConditions(**_set_fields(request.stopping, Stopping)),
        output=pb.OutputOptions(**_set_fields(request.output, OutputOptions)),
        speculation=pb.SpeculationOptions(**_set_fields(request.speculation, SpeculationOptions)),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    match request.prompt:
        case TextPrompt(text=text):
            message.text = text
        case TokenPrompt(token_ids=token_ids):
            message.token_ids.ids.extend(token_ids)
            message.token_ids.SetInParent()
        case ChatPrompt(messages=messages, add_generation_prompt=add):
            said = [pb.ChatMessage(role=_ROLE_NUMBERS[each.role], content=each.content) for each in messages]
            message.chat.CopyFrom(pb.Chat(messages=said, add_generation_prompt=add))
    if request.structured_output is not None:
        message.structured_output.CopyFrom(_encode_structured(request.structured_output))
    return message


def decode_request(message: pb.GenerateRequest) -> Request:
    """A request as it was sent. It needs a prompt and known roles, which `validate` sees to first."""
    return Request(
        prompt=_decode_prompt(message),
        request_id=message.request_id,
        sampling=decode_sampling(message.sampling),
        stopping=Stopping(**_present(message.stopping, Stopping)),
        output=OutputOptions(**_present(message.output, OutputOptions)),
        structured_output=_decode_structured(message) if message.HasField("structured_output") else None,
        speculation=SpeculationOptions(**_present(message.speculation, SpeculationOptions)),
        truncate_prompt_tokens=_optional(message, "truncate_prompt_tokens"),
        priority=_optional(message, "priority"),
        cache_salt=_optional(message, "cache_salt"),
    )


def encode_sampling(sampling: Sampling) -> pb.SamplingParameters:
    return pb.SamplingParameters(**_set_fields(sampling, Sampling) | {"logit_bias": dict(sampling.logit_bias)})


def decode_sampling(message: pb.SamplingParameters) -> Sampling:
    return Sampling(**_present(message, Sampling) | {"logit_bias": tuple(sorted(message.logit_bias.items()))})


def encode_response(response: Response) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=response.request_id,
        choices=encode_choices(response.choices),
        usage=pb.Usage(
            prompt_tokens=response.usage.prompt_tokens,
            cached_tokens=response.usage.cached_tokens,
            completion_tokens=response.usage.completion_tokens,
        ),
        seed=response.seed,
        prompt_logprobs=encode_positions(response.prompt_logprobs),
    )


def decode_response(message: pb.GenerateResponse) -> Response:
    return Response(
        request_id=message.request_id,
        choices=decode_choices(message.choices),
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            completion_tokens=message.usage.completion_tokens,
        ),
        seed=_optional(message, "seed"),
        prompt_logprobs=decode_positions(message.prompt_logprobs),
    )


def encode_choices(choices: Iterable[ChoiceDelta]) -> list[pb.ChoiceDelta]:
    return [_encode_choice(choice) for choice in choices]


def decode_choices(messages: Iterable[pb.ChoiceDelta]) -> tuple[ChoiceDelta, ...]:
    return tuple(_decode_choice(message) for message in messages)


def encode_positions(positions: Sequence[PositionLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(token=_encode_token(each.token), top=[_encode_token(token) for token in each.top])
        for each in positions
    ]


def decode_positions(messages: Iterable[pb.TokenLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(token=_decode_token(each.token), top=tuple(_decode_token(token) for token in each.top))
        for each in messages
    )


def _decode_prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(text=message.text)
        case "token_ids":
            return TokenPrompt(token_ids=tuple(message.token_ids.ids))
    said = [ChatMessage(role=ROLES[each.role], content=each.content) for each in message.chat.messages]
    return ChatPrompt(messages=tuple(said), add_generation_prompt=_optional(message.chat, "add_generation_prompt"))


def _encode_structured(constraint: StructuredOutput) -> pb.StructuredOutput:
    match constraint.kind:
        case "choice":
            return pb.StructuredOutput(choice=pb.Choices(texts=constraint.texts))
        case "json_object":
            return pb.StructuredOutput(json_object=pb.JsonObject())
    message = pb.StructuredOutput()
    setattr(message, constraint.kind, constraint.text)
    return message


def _decode_structured(message: pb.GenerateRequest) -> StructuredOutput:
    constraint = message.structured_output
    match constraint.WhichOneof("constraint"):
        case "choice":
            return StructuredOutput(kind="choice", texts=tuple(constraint.choice.texts))
        case "json_object":
            return StructuredOutput(kind="json_object")
        case "json_schema" | "regex" | "grammar" as kind:
            return StructuredOutput(kind=kind, text=getattr(constraint, kind))
    raise ValueError("structured_output without a constraint")


def _encode_choice(choice: ChoiceDelta) -> pb.ChoiceDelta:
    message = pb.ChoiceDelta(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=encode_positions(choice.logprobs),
    )
    if choice.finish_reason is not None:
        message.finish_reason = _FINISH_NUMBERS[choice.finish_reason]
    if isinstance(choice.matched_stop, str):
        message.stop_string = choice.matched_stop
    elif choice.matched_stop is not None:
        message.stop_token_id = choice.matched_stop
    if choice.speculation is not None:
        message.speculation.CopyFrom(_encode_figures(choice.speculation))
    return message


def _decode_choice(message: pb.ChoiceDelta) -> ChoiceDelta:
    matched = message.WhichOneof("matched_stop")
    return ChoiceDelta(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=decode_positions(message.logprobs),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        matched_stop=None if matched is None else getattr(message, matched),
        speculation=_decode_figures(message.speculation) if message.HasField("speculation") else None,
    )


def _encode_figures(figures: RoundFigures) -> pb.SpeculationFigures:
    return pb.SpeculationFigures(
        rounds=figures.acceptance.rounds,
        rounds_without_draft=figures.rounds_without_draft,
        drafted_tokens=figures.acceptance.drafted,
        accepted_tokens=figures.acceptance.accepted,
        accepted_by_position=figures.acceptance.accepted_by_position,
    )


def _decode_figures(message: pb.SpeculationFigures) -> RoundFigures:
    return RoundFigures(
        acceptance=AcceptanceFigures(
            rounds=message.rounds,
            drafted=message.drafted_tokens,
            accepted_by_position=tuple(message.accepted_by_position),
        ),
        rounds_without_draft=message.rounds_without_draft,
    )


def _encode_token(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token.token_id, text=token.text, logprob=token.logprob, rank=token.rank)


def _decode_token(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=message.token_id, text=message.text, logprob=message.logprob, rank=message.rank)


def _names(kind: "type[DataclassInstance]") -> list[str]:
    return [each.name for each in fields(kind)]


def _set_fields(value: Any, kind: "type[DataclassInstance]") -> dict[str, Any]:
    """The dataclass's fields, whose names are the message's, without those that are None: they stay unset."""
    return {name: getattr(value, name) for name in _names(kind) if getattr(value, name) is not None}


def _present(message: Any, kind: "type[DataclassInstance]") -> dict[str, Any]:
    """The message's fields by name: lists as tuples, and optional scalars that are set."""
    described = message.DESCRIPTOR.fields_by_name
    return {
        name: tuple(getattr(message, name)) if described[name].is_repeated else _optional(message, name)
        for name in _names(kind)
    }


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None
