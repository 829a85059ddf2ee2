"""Is a request right? Pure checks of what was sent, before a tokenizer or an engine sees it.

Each raises RequestError: INVALID_ARGUMENT with the field's path, or UNIMPLEMENTED for what this engine can't do.
"""

import json
import re
from collections.abc import Iterable, Sized
from typing import Any, Final

from dspark.v1 import generation_pb2 as pb

from cluster.serving import wire
from cluster.serving.errors import invalid, precondition, unimplemented
from cluster.serving.limits import Limits
from cluster.serving.model import ServedModel
from cluster.serving.types import ChatPrompt, Request, Sampling, Stopping, StructuredOutput, TextPrompt, TokenPrompt

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{0,128}")

_RANGES: Final = {
    # vLLM samples at 0.01 whatever lies between 0 and 0.01.
    "temperature": (0.0, 2.0, "0, or 0.01 to 2"),
    # Smaller ones vanish in float32.
    "top_p": (1e-6, 1.0, "above 0 (at least 1e-6), at most 1"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2"),
    # Logits are multiplied and divided by it.
    "repetition_penalty": (0.01, 100.0, "0.01 to 100; 1 is none"),
}
_LEAST_TEMPERATURE: Final = 0.01
_LARGEST_SEED: Final = 2**63 - 1


def validate(message: pb.GenerateRequest, model: ServedModel, limits: Limits) -> Request:
    """The typed request. What depends on the number of tokens is `check_lengths`'s, once they are known."""
    _check_wire(message)
    request = wire.decode_request(message)
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise invalid("request_id", "it may have at most 128 of A-Z a-z 0-9 . _ : -")
    _check_prompt(request, model, limits)
    _check_sampling(request.sampling, model, limits)
    _check_stopping(request.stopping, model, limits)
    for name in ("logprobs", "prompt_logprobs"):
        _at_most(f"output.{name}", getattr(request.output, name), model.max_logprobs)
    if request.structured_output is not None:
        _check_structured(request.structured_output, limits)
    if request.speculation.enabled and model.draft is None:
        raise precondition("speculation.enabled", f"{model.name} is served without a draft")
    if request.priority and not model.schedules_by_priority:
        raise unimplemented("priority", "this engine schedules first come, first served")
    if request.cache_salt is not None:
        _length("cache_salt", request.cache_salt, limits.max_cache_salt_length)
    return request


def check_lengths(request: Request, prompt_tokens: int, model: ServedModel) -> int:
    """Do prompt and output fit the context? The most tokens that a choice may have."""
    room = model.max_model_len - prompt_tokens
    if prompt_tokens == 0:
        raise invalid("prompt", "it has no tokens")
    if room < 1:
        why = f"{prompt_tokens:,} tokens; the context holds {model.max_model_len:,}, the answer included"
        raise invalid("prompt", why)
    wanted = request.stopping.max_tokens
    if wanted is not None and wanted > room:
        why = f"{wanted:,}; the context holds {model.max_model_len:,} tokens, the prompt's {prompt_tokens:,} included"
        raise invalid("stopping.max_tokens", why)
    most = wanted if wanted is not None else min(model.default_max_tokens or room, room)
    if (request.stopping.min_tokens or 0) > most:
        raise invalid("stopping.min_tokens", f"{request.stopping.min_tokens:,}; a choice has at most {most:,} tokens")
    return most


def _check_wire(message: pb.GenerateRequest) -> None:
    """What `Request` can't express."""
    if message.WhichOneof("prompt") is None:
        raise invalid("prompt", "one of text, token_ids and chat is needed")
    for index, said in enumerate(message.chat.messages):
        if said.role not in wire.ROLES:
            raise invalid(f"prompt.chat.messages[{index}].role", f"{said.role} is no role")
    if message.HasField("structured_output") and message.structured_output.WhichOneof("constraint") is None:
        raise invalid("structured_output", "one of its constraints is needed")


def _check_prompt(request: Request, model: ServedModel, limits: Limits) -> None:
    match request.prompt:
        case TextPrompt(text=text):
            _length("prompt.text", text, limits.max_prompt_characters)
            if not text:
                raise invalid("prompt.text", "it is empty")
        case TokenPrompt(token_ids=token_ids):
            if not token_ids:
                raise invalid("prompt.token_ids", "there are none")
            _in_vocabulary("prompt.token_ids.ids", token_ids, model)
        case ChatPrompt(messages=messages):
            if not model.has_chat_template:
                raise precondition("prompt.chat", f"{model.name} has no chat template; send text or token_ids")
            _count("prompt.chat.messages", messages, limits.max_chat_messages)
            if not messages:
                raise invalid("prompt.chat.messages", "there are none")
            if sum(len(each.content) for each in messages) > limits.max_prompt_characters:
                raise invalid("prompt.chat", f"more than {limits.max_prompt_characters:,} characters")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "0 leaves no prompt")


def _check_sampling(sampling: Sampling, model: ServedModel, limits: Limits) -> None:
    for name, (least, most, words) in _RANGES.items():
        value = getattr(sampling, name)
        # Written so that NaN is outside.
        if value is not None and not least <= value <= most:
            raise invalid(f"sampling.{name}", f"{value:g} is not in its range: {words}")
    temperature = _or_default(sampling.temperature, model.default_sampling.temperature)
    if 0.0 < temperature < _LEAST_TEMPERATURE:
        raise invalid("sampling.temperature", f"{temperature:g} is not in its range: {_RANGES['temperature'][2]}")
    most = min(limits.max_n, limits.max_running)
    if sampling.n is not None and not 1 <= sampling.n <= most:
        raise invalid("sampling.n", f"{sampling.n} is not in its range: 1 to {most}")
    if (sampling.n or 1) > 1 and temperature == 0.0:
        raise invalid("sampling.n", "with temperature 0 all choices would be the same: n must be 1")
    # Choice i of n draws from seed + i.
    if sampling.seed is not None and sampling.seed > _LARGEST_SEED - limits.max_n:
        raise invalid("sampling.seed", f"{sampling.seed} is above 2^63 - 1 - {limits.max_n}")
    _count("sampling.logit_bias", sampling.logit_bias, limits.max_logit_bias)
    _in_vocabulary("sampling.logit_bias", (token for token, _ in sampling.logit_bias), model)
    for token, bias in sampling.logit_bias:
        if not -100.0 <= bias <= 100.0:
            raise invalid(f"sampling.logit_bias[{token}]", f"{bias:g} is not in its range: -100 to 100")
    _count("sampling.allowed_token_ids", sampling.allowed_token_ids, limits.max_allowed_token_ids)
    _in_vocabulary("sampling.allowed_token_ids", sampling.allowed_token_ids, model)
    _texts("sampling.bad_words", sampling.bad_words, limits.max_bad_words, limits.max_bad_word_length)
    if any(not word.strip() for word in sampling.bad_words):
        raise invalid("sampling.bad_words", "a word may not be blank")
    if model.draft is not None:
        for name, used in (("min_p", sampling.min_p), ("logit_bias", sampling.logit_bias)):
            if used:
                raise unimplemented(f"sampling.{name}", "vLLM 0.32 can't combine it with speculative decoding")


def _check_stopping(stopping: Stopping, model: ServedModel, limits: Limits) -> None:
    if stopping.max_tokens == 0:
        raise invalid("stopping.max_tokens", "0; at least 1 token is generated")
    _texts("stopping.stop_strings", stopping.stop_strings, limits.max_stop_strings, limits.max_stop_string_length)
    _count("stopping.stop_token_ids", stopping.stop_token_ids, limits.max_stop_token_ids)
    _in_vocabulary("stopping.stop_token_ids", stopping.stop_token_ids, model)


def _check_structured(constraint: StructuredOutput, limits: Limits) -> None:
    path = f"structured_output.{constraint.kind}"
    size = len(constraint.text.encode()) + sum(len(text.encode()) for text in constraint.texts)
    if size > limits.max_structured_output_bytes:
        raise invalid(path, f"{size:,} bytes; at most {limits.max_structured_output_bytes:,}")
    match constraint.kind:
        case "choice":
            _texts(f"{path}.texts", constraint.texts, limits.max_choice_texts, limits.max_structured_output_bytes)
            if not constraint.texts:
                raise invalid(f"{path}.texts", "there are none")
        case "json_schema":
            _check_schema(path, constraint.text, limits)
        case "regex":
            _length(path, constraint.text, limits.max_regex_length)
            if "\0" in constraint.text:
                raise invalid(path, "it has a NUL character")
        case "grammar" if not constraint.text.strip():
            raise invalid(path, "it is empty")


def _check_schema(path: str, text: str, limits: Limits) -> None:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise invalid(path, f"it nests deeper than {limits.max_json_nesting} levels") from error
    except ValueError as error:
        raise invalid(path, f"it is no JSON ({error})") from error
    if not isinstance(schema, dict):
        raise invalid(path, "it is no JSON object")
    level: list[Any] = [schema]
    for _ in range(limits.max_json_nesting):
        inside = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inside if isinstance(child, dict | list)]
        if not level:
            return
    raise invalid(path, f"it nests deeper than {limits.max_json_nesting} levels")


def _or_default(value: float | None, default: float | None) -> float:
    chosen = value if value is not None else default
    assert chosen is not None  # a served model has a default for every scalar
    return chosen


def _at_most(path: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise invalid(path, f"{value:,}; at most {most:,}")


def _count(path: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise invalid(path, f"{len(values):,} of them; at most {most:,}")


def _length(path: str, text: str, most: int) -> None:
    if len(text) > most:
        raise invalid(path, f"{len(text):,} characters; at most {most:,}")


def _texts(path: str, texts: tuple[str, ...], count: int, length: int) -> None:
    _count(path, texts, count)
    for index, text in enumerate(texts):
        if not text:
            raise invalid(f"{path}[{index}]", "it is empty")
        _length(f"{path}[{index}]", text, length)


def _in_vocabulary(path: str, token_ids: Iterable[int], model: ServedModel) -> None:
    for index, token in enumerate(token_ids):
        if token >= model.vocab_size:
            raise invalid(f"{path}[{index}]", f"{token}; the vocabulary has {model.vocab_size:,} tokens")
