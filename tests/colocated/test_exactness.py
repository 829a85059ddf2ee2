"""Speculation in the target's process changes the speed, never the text."""

from dataclasses import replace

from tests.colocated.conftest import Arms, greedy

SHORT, MEDIUM, LONG = tuple(range(7, 11)), tuple(range(40, 73)), tuple(range(100, 400))


def test_greedy_output_with_a_draft_is_that_without(arms: Arms) -> None:
    requests = [*greedy(SHORT, max_tokens=9), *greedy(MEDIUM, LONG, MEDIUM[3:], SHORT[1:])]
    plain, drafted = arms.plain.generate(requests), arms.colocated.generate(requests)
    assert [completion.token_ids for completion in drafted] == [completion.token_ids for completion in plain]
    assert [completion.text for completion in drafted] == [completion.text for completion in plain]
    assert all(completion.acceptance is not None and completion.acceptance.rounds > 0 for completion in drafted)
    assert all(completion.acceptance is None for completion in plain)


def test_a_prompt_from_the_prefix_cache_gives_the_same_output(arms: Arms) -> None:
    first = arms.colocated.generate(greedy(LONG))[0]
    again = arms.colocated.generate(greedy(LONG))[0]
    assert again.num_cached_tokens > 0
    assert again.token_ids == first.token_ids == arms.plain.generate(greedy(LONG))[0].token_ids


def test_a_draft_that_agrees_gives_rounds_of_every_length(arms: Arms) -> None:
    if not arms.name.endswith("-agreeing"):
        return
    prompts = [tuple(range(start, start + 5)) for start in range(0, 160, 20)]
    completions = arms.colocated.generate(greedy(*prompts, max_tokens=40))
    lengths = {length for completion in completions for length in completion.accepted_by_round}
    assert lengths == set(range(arms.num_speculative_tokens + 1))


def test_a_seeded_request_is_repeatable(arms: Arms) -> None:
    requests = [replace(request, temperature=1.0, seed=11) for request in greedy(SHORT, MEDIUM, max_tokens=12)]
    first, second = arms.colocated.generate(requests), arms.colocated.generate(requests)
    assert [completion.token_ids for completion in first] == [completion.token_ids for completion in second]
    other = [replace(request, seed=12) for request in requests]
    assert [c.token_ids for c in arms.colocated.generate(other)] != [c.token_ids for c in first]


def test_a_stream_that_is_closed_leaves_the_engine_usable(arms: Arms) -> None:
    expected = arms.colocated.generate(greedy(SHORT))[0]
    stream = arms.colocated.stream(greedy(SHORT, MEDIUM, max_tokens=200))
    next(stream)
    stream.close()
    assert not arms.colocated.vllm_engine.has_unfinished_requests()
    assert arms.colocated.generate(greedy(SHORT))[0].token_ids == expected.token_ids
