"""What a client gets is what the target alone makes, in deltas, with its figures."""

import json
import math
import urllib.request

import grpc
import pytest

from cluster.client import (
    ChatMessage,
    ChatPrompt,
    Client,
    FinishReason,
    GenerationError,
    Request,
    Response,
    Sampling,
    Stopping,
    StructuredOutput,
    TextPrompt,
    join_responses,
)
from cluster.engine.async_engine import AsyncEngine
from cluster.engine.in_process import InProcessEngine
from cluster.serving.server import GenerationServer
from cluster.serving.types import RoundFigures
from tests.serving.requests import MEDIUM, SHORT, alone_request, greedy


def test_a_stream_is_what_the_target_alone_makes(client: Client, alone: InProcessEngine) -> None:
    expected = alone.generate([alone_request(MEDIUM, 24)])[0]
    responses = list(client.stream(greedy(MEDIUM, 24, request_id="one")))
    assert len(responses) > 2  # one a round, not one at the end
    assert {response.request_id for response in responses} == {"one"}
    assert [choice.finish_reason for response in responses for choice in response.choices][:-1] == [None] * (
        len(responses) - 1
    )
    joined = join_responses(responses)
    assert joined.choices[0].token_ids == expected.token_ids
    assert joined.choices[0].text == expected.text
    assert joined.choices[0].finish_reason is FinishReason.LENGTH
    counts = [response.usage.completion_tokens for response in responses]
    assert counts == sorted(counts)
    assert (joined.usage.prompt_tokens, counts[-1]) == (len(MEDIUM), 24)


def test_each_response_has_its_rounds_figures(client: Client, engine: AsyncEngine) -> None:
    responses = list(client.stream(greedy(MEDIUM, 30)))
    deltas = [choice for response in responses for choice in response.choices]
    figures = [_figures(choice.speculation) for choice in deltas]
    # The prompt's step makes one token and verifies none.
    assert figures[0].acceptance.rounds == 0
    # Before the end, a response's tokens are its rounds' own and what they accepted.
    for choice, part in list(zip(deltas, figures, strict=True))[1:-1]:
        assert len(choice.token_ids) == part.acceptance.rounds + part.acceptance.accepted
    total = _figures(join_responses(responses).choices[0].speculation)
    draft = engine.model.draft
    assert draft is not None
    assert total.acceptance.drafted == total.acceptance.rounds * draft.num_speculative_tokens
    assert total.acceptance.accepted > 0
    assert len(total.acceptance.accepted_by_position) == draft.num_speculative_tokens
    assert list(total.acceptance.accepted_by_position) == sorted(total.acceptance.accepted_by_position, reverse=True)
    assert total.rounds_without_draft == 0


def _figures(figures: RoundFigures | None) -> RoundFigures:
    assert figures is not None
    return figures


def test_each_request_has_the_speculation_it_asks_for(client: Client) -> None:
    """In one batch: without a draft, with a shorter one, with the whole one."""
    asked = [{"enabled": False}, {"max_tokens": 0}, {"max_tokens": 2}, {"enabled": True, "max_tokens": 99}, {}]
    answers = client.generate_batch([greedy(MEDIUM, 20, speculation=each) for each in asked])
    assert len({answer.choices[0].token_ids for answer in answers}) == 1
    figures = [_figures(answer.choices[0].speculation) for answer in answers]
    for none in figures[:2]:
        assert (none.acceptance.rounds, none.acceptance.drafted, none.rounds_without_draft) == (0, 0, 19)
    for drafted, part in zip((2, 4, 4), figures[2:], strict=True):
        assert part.rounds_without_draft == 0
        assert part.acceptance.accepted > 0
        # The last round drafts no more than the choice has still room for.
        assert drafted * (part.acceptance.rounds - 1) < part.acceptance.drafted <= drafted * part.acceptance.rounds
    assert figures[2].acceptance.rounds > figures[3].acceptance.rounds
    assert figures[2].acceptance.accepted_by_position[2:] == (0, 0)


def test_text_and_chat_are_tokenized_as_the_model_wants(
    client: Client, engine: AsyncEngine, alone: InProcessEngine
) -> None:
    tokenizer = engine.vllm_engine.renderer.get_tokenizer()
    text, said = "Why is the sky blue?", [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = ChatPrompt(messages=tuple(ChatMessage(**each) for each in said))
    stopping = Stopping(max_tokens=8, ignore_eos=True)
    for prompt, encoded in (
        (TextPrompt(text=text), tokenizer(text)),
        (chat, tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)),
    ):
        answer = client.generate(Request(prompt=prompt, sampling=Sampling(temperature=0.0), stopping=stopping))
        token_ids = tuple(encoded["input_ids"])
        assert answer.usage.prompt_tokens == len(token_ids)
        assert answer.choices[0].token_ids == alone.generate([alone_request(token_ids, 8)])[0].token_ids


def test_truncation_keeps_the_prompts_end(client: Client) -> None:
    whole, cut = client.generate(greedy(MEDIUM[-9:])), client.generate(greedy(MEDIUM, truncate_prompt_tokens=9))
    assert cut.usage.prompt_tokens == 9
    assert cut.choices[0].token_ids == whole.choices[0].token_ids


def test_a_repeated_prompt_comes_from_the_cache_unless_its_salt_differs(client: Client) -> None:
    prompt = tuple(range(100, 400))  # two blocks of 128, of which the last is computed again for the draft's sake
    first, again = client.generate(greedy(prompt, 2)), client.generate(greedy(prompt, 2))
    salted = client.generate(greedy(prompt, 2, cache_salt="another"))
    assert (first.usage.cached_tokens, salted.usage.cached_tokens) == (0, 0)
    assert again.usage.cached_tokens == 128


def test_a_stop_string_ends_the_text_before_it(client: Client, alone: InProcessEngine) -> None:
    text = alone.generate([alone_request(SHORT, 20)])[0].text
    stop = text[8:11]
    ended = client.generate(greedy(SHORT, 20, stopping={"stop_strings": ("\n never", stop)})).choices[0]
    assert (ended.finish_reason, ended.matched_stop) == (FinishReason.STOP_STRING, stop)
    assert ended.text == text[: text.index(stop)]
    kept = client.generate(greedy(SHORT, 20, stopping={"stop_strings": (stop,), "include_stop_string": True}))
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]


def test_a_stop_token_ends_the_choice_and_is_named(client: Client, alone: InProcessEngine) -> None:
    tokens = alone.generate([alone_request(SHORT, 20)])[0].token_ids
    stop = tokens[7]
    ended = client.generate(greedy(SHORT, 20, stopping={"stop_token_ids": (stop,)})).choices[0]
    assert (ended.finish_reason, ended.matched_stop) == (FinishReason.STOP_TOKEN, stop)
    assert ended.token_ids == tokens[: tokens.index(stop) + 1]
    later = client.generate(greedy(SHORT, 20, stopping={"stop_token_ids": (stop,), "min_tokens": 15})).choices[0]
    assert len(later.token_ids) >= 15


def test_logprobs_are_the_targets(client: Client) -> None:
    request = greedy(SHORT, 9, output={"logprobs": 3, "prompt_logprobs": 2})
    responses = list(client.stream(request))
    answer = join_responses(responses)
    choice = answer.choices[0]
    assert [position.token.token_id for position in choice.logprobs] == list(choice.token_ids)
    for position in choice.logprobs:
        assert [token.rank for token in position.top] == [1, 2, 3]
        assert position.top[0] == position.token  # greedy
        assert sum(math.exp(token.logprob) for token in position.top) <= 1.0
    assert [position.token.token_id for position in answer.prompt_logprobs] == list(SHORT[1:])
    assert all(len(position.top) == 2 for position in answer.prompt_logprobs)
    assert not any(response.prompt_logprobs for response in responses[1:])
    own = client.generate(greedy(SHORT, 3, output={"logprobs": 0})).choices[0]
    assert [len(position.top) for position in own.logprobs] == [0, 0, 0]


def test_a_seed_is_echoed_and_makes_the_output_repeatable(client: Client) -> None:
    def drawn(seed: int | None) -> Response:
        return client.generate(greedy(SHORT, 6, sampling={"temperature": 1.5, "seed": seed}))

    one, again, other, unset = drawn(11), drawn(11), drawn(2**62), drawn(None)
    assert one.choices[0].token_ids == again.choices[0].token_ids != other.choices[0].token_ids
    assert [answer.seed for answer in (one, other, unset)] == [11, 2**62, None]


def test_choices_are_drawn_apart(client: Client) -> None:
    request = greedy(SHORT, 6, sampling={"temperature": 1.5, "n": 3, "seed": 5})
    answer = client.generate(request)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.token_ids for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens == 18
    assert all(choice.finish_reason is FinishReason.LENGTH for choice in answer.choices)


def test_words_and_tokens_can_be_forbidden(client: Client) -> None:
    free = client.generate(greedy(SHORT, 6)).choices[0].token_ids
    allowed = tuple(range(300, 310))
    assert set(client.generate(greedy(SHORT, 6, sampling={"allowed_token_ids": allowed})).choices[0].token_ids) <= set(
        allowed
    )
    text = client.generate(greedy(SHORT, 6)).choices[0].text
    other = client.generate(greedy(SHORT, 6, sampling={"bad_words": (text[:2],)})).choices[0]
    assert other.token_ids[0] != free[0]


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "right"),
    [
        (StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA)), lambda text: set(json.loads(text)) == {"ok"}),
        (StructuredOutput(kind="regex", text="[0-9]{3}-[0-9]{2}"), lambda text: len(text) == 6 and text[3] == "-"),
        (StructuredOutput(kind="grammar", text='root ::= "yes" | "no"'), lambda text: text in ("yes", "no")),
        (StructuredOutput(kind="choice", texts=("red", "green")), lambda text: text in ("red", "green")),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_structured_output_has_its_form(client: Client, constraint: StructuredOutput, right: object) -> None:
    request = greedy(SHORT, 60, stopping={"ignore_eos": False}, structured_output=constraint)
    choice = client.generate(request).choices[0]
    assert choice.finish_reason is FinishReason.END_OF_SEQUENCE, choice
    assert callable(right)
    assert right(choice.text), choice.text


def test_a_form_that_nothing_has_is_invalid(client: Client) -> None:
    constraint = StructuredOutput(kind="json_schema", text='{"$ref": "#"}')
    with pytest.raises(GenerationError) as refusal:
        client.generate(greedy(SHORT, 5, structured_output=constraint))
    assert (refusal.value.status, refusal.value.field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "structured_output.json_schema",
    )


def test_a_batch_is_its_requests_joined(client: Client, alone: InProcessEngine) -> None:
    prompts = [SHORT, MEDIUM, MEDIUM[5:]]
    expected = alone.generate([alone_request(prompt, 10) for prompt in prompts])
    answers = client.generate_batch([greedy(prompt, 10, request_id=f"b{i}") for i, prompt in enumerate(prompts)])
    assert [answer.request_id for answer in answers] == ["b0", "b1", "b2"]
    assert [answer.choices[0].token_ids for answer in answers] == [each.token_ids for each in expected]


def test_the_metrics_page_has_vllms_figures_and_ours(server: GenerationServer, client: Client) -> None:
    def page() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
            samples = [line.rpartition(" ") for line in response.read().decode().splitlines() if line[0] != "#"]
        return {name.partition("{")[0]: float(value) for name, _, value in samples}

    before, speculation = page(), join_responses(client.stream(greedy(MEDIUM, 20))).choices[0].speculation
    after = page()
    figures = _figures(speculation).acceptance
    counted = {
        "vllm:spec_decode_num_drafts_total": figures.rounds,
        "vllm:spec_decode_num_draft_tokens_total": figures.drafted,
        "vllm:spec_decode_num_accepted_tokens_total": figures.accepted,
        "vllm:generation_tokens_total": 20,
    }
    assert {name: after[name] - before[name] for name in counted} == counted
    assert after["dspark_running_choices"] == 0
