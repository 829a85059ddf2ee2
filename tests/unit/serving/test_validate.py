"""What a request can get wrong, each by the path of its field, before an engine sees it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from dspark.v1 import generation_pb2 as pb

from cluster.serving.errors import RequestError
from cluster.serving.limits import Limits
from cluster.serving.model import ServedDraft, ServedModel
from cluster.serving.types import Request, Sampling, Stopping, StructuredOutput, TokenPrompt
from cluster.serving.validate import check_lengths, validate
from cluster.serving.wire import decode_request, encode_request

PLAIN = ServedModel(
    name="tiny",
    vocab_size=512,
    max_model_len=64,
    max_logprobs=20,
    has_chat_template=True,
    default_sampling=Sampling(n=1, temperature=1.0),
    default_max_tokens=None,
    schedules_by_priority=False,
    vllm_version="0.32.0",
)
DRAFTED = replace(PLAIN, draft=ServedDraft(model="draft", method="dspark", num_speculative_tokens=4))
LIMITS = Limits(
    max_prompt_characters=100,
    max_chat_messages=3,
    max_n=8,
    max_running=4,
    max_stop_strings=2,
    max_stop_string_length=5,
    max_stop_token_ids=2,
    max_logit_bias=2,
    max_allowed_token_ids=2,
    max_bad_words=2,
    max_bad_word_length=5,
    max_structured_output_bytes=200,
    max_json_nesting=4,
    max_regex_length=10,
    max_choice_texts=2,
    max_cache_salt_length=4,
)

Change = Callable[[pb.GenerateRequest], Any]


def message(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"token_ids": pb.TokenIds(ids=[1, 2, 3])} | fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return message(sampling=pb.SamplingParameters(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return message(stopping=pb.StoppingConditions(**fields))


def structured(**fields: Any) -> pb.GenerateRequest:
    return message(structured_output=pb.StructuredOutput(**fields))


def chat(*said: tuple[int, str]) -> pb.GenerateRequest:
    return message(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in said]))  # type: ignore[arg-type]


def schema(**fields: Any) -> pb.GenerateRequest:
    return structured(json_schema=json.dumps(fields))


NAN, INF = float("nan"), float("inf")

WRONG = [
    (message(request_id="a b"), "request_id"),
    (message(request_id="x" * 129), "request_id"),
    (pb.GenerateRequest(), "prompt"),
    (message(text=""), "prompt.text"),
    (message(text="x" * 101), "prompt.text"),
    (message(token_ids=pb.TokenIds()), "prompt.token_ids"),
    (message(token_ids=pb.TokenIds(ids=[1, 512])), "prompt.token_ids.ids[1]"),
    (chat(), "prompt.chat.messages"),
    (chat((0, "hi")), "prompt.chat.messages[0].role"),
    (chat((pb.CHAT_ROLE_USER, "hi"), (77, "hi")), "prompt.chat.messages[1].role"),
    (chat(*[(pb.CHAT_ROLE_USER, "hi")] * 4), "prompt.chat.messages"),
    (chat(*[(pb.CHAT_ROLE_USER, "x" * 60)] * 2), "prompt.chat"),
    (message(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (message(cache_salt="xxxxx"), "cache_salt"),
    (sampling(n=0), "sampling.n"),
    (sampling(n=5), "sampling.n"),  # as many as may run
    (sampling(n=2, temperature=0.0), "sampling.n"),
    *[(sampling(temperature=value), "sampling.temperature") for value in (-0.1, 2.1, 0.001, NAN, INF)],
    *[(sampling(top_p=value), "sampling.top_p") for value in (0.0, 1e-320, 1.1, -1.0, NAN)],
    *[(sampling(min_p=value), "sampling.min_p") for value in (-0.1, 1.1, NAN)],
    *[(sampling(presence_penalty=value), "sampling.presence_penalty") for value in (-2.1, 2.1, NAN, INF)],
    *[(sampling(frequency_penalty=value), "sampling.frequency_penalty") for value in (-2.1, 2.1, NAN, -INF)],
    *[(sampling(repetition_penalty=value), "sampling.repetition_penalty") for value in (0.0, -1.0, 1e300, NAN, INF)],
    (sampling(seed=2**63), "sampling.seed"),
    (sampling(seed=2**63 - 1), "sampling.seed"),  # the next choice's would be one more
    (sampling(logit_bias={1: 0.0, 2: 0.0, 3: 0.0}), "sampling.logit_bias"),
    (sampling(logit_bias={512: 1.0}), "sampling.logit_bias[0]"),
    (sampling(logit_bias={5: 101.0}), "sampling.logit_bias[5]"),
    (sampling(logit_bias={5: NAN}), "sampling.logit_bias[5]"),
    (sampling(allowed_token_ids=[1, 2, 3]), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=[1, 2**32 - 1]), "sampling.allowed_token_ids[1]"),
    (sampling(bad_words=["a", "b", "c"]), "sampling.bad_words"),
    (sampling(bad_words=["a", "too long"]), "sampling.bad_words[1]"),
    (sampling(bad_words=["  "]), "sampling.bad_words"),
    (stopping(max_tokens=0), "stopping.max_tokens"),
    (stopping(stop_strings=["a", "b", "c"]), "stopping.stop_strings"),
    (stopping(stop_strings=["a", ""]), "stopping.stop_strings[1]"),
    (stopping(stop_strings=["too long"]), "stopping.stop_strings[0]"),
    (stopping(stop_token_ids=[1, 2, 3]), "stopping.stop_token_ids"),
    (stopping(stop_token_ids=[999]), "stopping.stop_token_ids[0]"),
    (message(output=pb.OutputOptions(logprobs=21)), "output.logprobs"),
    (message(output=pb.OutputOptions(prompt_logprobs=21)), "output.prompt_logprobs"),
    (structured(), "structured_output"),
    (structured(regex="a" * 11), "structured_output.regex"),
    (structured(regex="a\0b"), "structured_output.regex"),
    (structured(grammar=" "), "structured_output.grammar"),
    (structured(grammar="a" * 201), "structured_output.grammar"),
    (structured(choice=pb.Choices()), "structured_output.choice.texts"),
    (structured(choice=pb.Choices(texts=["a", "b", "c"])), "structured_output.choice.texts"),
    (structured(choice=pb.Choices(texts=["a", ""])), "structured_output.choice.texts[1]"),
    (structured(json_schema=""), "structured_output.json_schema"),
    (structured(json_schema="3"), "structured_output.json_schema"),
    (structured(json_schema="{"), "structured_output.json_schema"),
    (structured(json_schema="[" * 100 + "]" * 100), "structured_output.json_schema"),
    (schema(a={"b": {"c": {"d": {"e": 1}}}}), "structured_output.json_schema"),
]

CANNOT = [
    (sampling(min_p=0.1), "sampling.min_p"),
    (sampling(logit_bias={1: 1.0}), "sampling.logit_bias"),
    (message(priority=1), "priority"),
]


@pytest.mark.parametrize(("request_", "field"), WRONG)
@pytest.mark.parametrize("model", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_a_wrong_value_is_invalid_by_the_path_of_its_field(
    request_: pb.GenerateRequest, field: str, model: ServedModel
) -> None:
    with pytest.raises(RequestError) as refusal:
        validate(request_, model, LIMITS)
    assert refusal.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")


@pytest.mark.parametrize(("request_", "field"), CANNOT)
def test_what_the_engine_cannot_do_is_unimplemented_by_name(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(RequestError) as refusal:
        validate(request_, DRAFTED, LIMITS)
    assert refusal.value.status is grpc.StatusCode.UNIMPLEMENTED
    assert refusal.value.field == field
    assert field in DRAFTED.unimplemented_fields


@pytest.mark.parametrize(
    "request_",
    [
        sampling(min_p=0.0),
        sampling(top_k=2**32 - 1),
        sampling(seed=0),
        sampling(n=4),
        sampling(n=1, temperature=0.0),
        stopping(min_tokens=0, stop_strings=["abcde"]),
        message(speculation=pb.SpeculationOptions(enabled=True, max_tokens=4)),
        message(speculation=pb.SpeculationOptions(enabled=False)),
        message(speculation=pb.SpeculationOptions(max_tokens=2**32 - 1)),
        message(priority=0),
        message(cache_salt=""),
        structured(json_object=pb.JsonObject()),
        schema(type="object"),
        chat((pb.CHAT_ROLE_USER, "")),
    ],
)
def test_what_the_engine_can_do_is_let_through(request_: pb.GenerateRequest) -> None:
    validate(request_, DRAFTED, LIMITS)


def test_without_a_draft_speculation_cannot_be_asked_for_but_its_exclusions_can() -> None:
    for allowed in (sampling(min_p=0.1), sampling(logit_bias={1: 1.0})):
        validate(allowed, PLAIN, LIMITS)
    validate(message(speculation=pb.SpeculationOptions(enabled=False, max_tokens=0)), PLAIN, LIMITS)
    with pytest.raises(RequestError) as refusal:
        validate(message(speculation=pb.SpeculationOptions(enabled=True)), PLAIN, LIMITS)
    assert (refusal.value.status, refusal.value.field) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "speculation.enabled",
    )


def test_a_model_without_a_template_takes_no_chat() -> None:
    with pytest.raises(RequestError) as refusal:
        validate(chat((pb.CHAT_ROLE_USER, "hi")), replace(PLAIN, has_chat_template=False), LIMITS)
    assert (refusal.value.status, refusal.value.field) == (grpc.StatusCode.FAILED_PRECONDITION, "prompt.chat")


@pytest.mark.parametrize(
    ("conditions", "prompt_tokens", "most", "field"),
    [
        (Stopping(), 60, 4, None),
        (Stopping(max_tokens=4), 60, 4, None),
        (Stopping(max_tokens=5), 60, None, "stopping.max_tokens"),
        (Stopping(min_tokens=5), 60, None, "stopping.min_tokens"),
        (Stopping(max_tokens=3, min_tokens=4), 10, None, "stopping.min_tokens"),
        (Stopping(), 63, 1, None),
        (Stopping(), 64, None, "prompt"),
        (Stopping(), 0, None, "prompt"),
    ],
)
def test_prompt_and_output_must_fit_the_context(
    conditions: Stopping, prompt_tokens: int, most: int | None, field: str | None
) -> None:
    request = Request(prompt=TokenPrompt(token_ids=(1,)), stopping=conditions)
    if field is None:
        assert check_lengths(request, prompt_tokens, PLAIN) == most
        return
    with pytest.raises(RequestError) as refusal:
        check_lengths(request, prompt_tokens, PLAIN)
    assert (refusal.value.status, refusal.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_models_own_length_gives_way_to_the_context() -> None:
    request = Request(prompt=TokenPrompt(token_ids=(1,)))
    assert check_lengths(request, 60, replace(PLAIN, default_max_tokens=100)) == 4
    assert check_lengths(request, 10, replace(PLAIN, default_max_tokens=20)) == 20


def test_unset_stays_unset_and_zero_stays_zero_on_the_wire() -> None:
    request = Request(
        prompt=TokenPrompt(token_ids=(1,)),
        sampling=Sampling(temperature=0.0, seed=0, logit_bias=((3, -1.5),)),
        stopping=Stopping(min_tokens=0, ignore_eos=False),
        structured_output=StructuredOutput(kind="regex", text=""),
        cache_salt="",
    )
    assert decode_request(encode_request(request)) == request
    assert not encode_request(request).sampling.HasField("top_p")
    with pytest.raises(ValueError, match="out of range"):
        encode_request(replace(request, stopping=Stopping(max_tokens=-1)))
