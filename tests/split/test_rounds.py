"""The draft in another process drafts what it drafts in the target's: every token of every round."""

import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.engine.in_process import GenerationRequest
from tests.split.arms import BLOCK_SIZE, Arm, Arms, Round, Row, await_draft, greedy, remote, separate_of

SHORT, MEDIUM, LONG = range(7, 11), range(40, 60), range(100, 290)


@pytest.mark.parametrize("num_requests", [1, 3, 17])
def test_requests_of_unequal_length(arms: Arms, num_requests: int) -> None:
    """Seventeen over sixteen slots: the last one takes over the slot, and the block, of the first to end."""
    shapes = [(range(7 + 20 * i, 10 + 20 * i), 6 + 5 * i % 8) for i in range(num_requests)]
    completions, rounds = arms.compare([greedy(prompt, length) for prompt, length in shapes])
    assert [len(completion.token_ids) for completion in completions] == [length for _, length in shapes]
    assert max(map(len, rounds)) == min(num_requests, 16)
    # Fewer tokens are wanted where requests are many, then none: the draft takes in the states all the same.
    assert {len(row.drafts) for row in all_rows(rounds)} == ({0, 2, 4} if num_requests > 12 else {4})


def test_rounds_have_every_length(arms: Arms) -> None:
    completions, _ = arms.compare([greedy(range(start, start + 5), 25) for start in range(0, 80, 20)])
    assert {length for completion in completions for length in completion.accepted_by_round} == {0, 1, 2, 3, 4}


def test_a_prompt_in_chunks_and_a_second_conversation(arms: Arms) -> None:
    """Chunks yield no token, and their states must reach the draft all the same. The target emits no states for cached
    tokens: there the draft's KV must be under the same block ids already."""
    first, rounds = arms.compare([greedy(LONG, 10), greedy(SHORT, 14)])
    assert sum(row.num_sampled == 0 for row in all_rows(rounds)) >= len(LONG) // 128
    answer = first[0].token_ids
    second, _ = arms.compare([greedy([*LONG, *answer, *SHORT], 12), greedy(LONG, 10)])
    assert all(completion.num_cached_tokens >= 2 * BLOCK_SIZE for completion in second)


def test_a_preempted_request(arms: Arms) -> None:
    """More requests than fit, each of which comes to need a block more: one must wait, and go on later."""
    prompts = [range(start, start + 150) for start in (5, 130, 255, 350)]
    _, rounds = arms.compare([greedy(prompt, 70) for prompt in prompts])
    assert any(was_preempted(rounds, request) for request in range(len(prompts)))


def test_blocks_that_changed_hands(arms: Arms) -> None:
    """A draft that reads its target's KV must not read a block for its last owner. What is freed and not cached, and
    what is given to a new owner, is overwritten at once; with chunks, cached prefixes and a preemption."""
    if arms.separate.contract.kv_sharing is None:
        pytest.skip("this draft reads none of its target's KV")
    prompts = [range(start, start + 150) for start in (305, 30, 155, 250)]
    with poisoned_blocks(arms.separate) as poisoned:
        _, rounds = arms.compare([greedy(prompt, 60) for prompt in prompts])
        arms.compare([greedy([*prompt, 7], 12) for prompt in prompts])
    assert any(was_preempted(rounds, request) for request in range(len(prompts)))
    assert sum(times > 2 for times in Counter(poisoned).values()) > 10  # they had one owner after the other


def test_a_block_that_changes_hands_too_early(arms: Arms) -> None:
    """The fault that the test before looks for, on purpose: a new owner writes to what the draft is yet to read. It
    shows, and it spoils drafts, nothing else."""
    if arms.separate.contract.kv_sharing is None:
        pytest.skip("this draft reads none of its target's KV")
    requests = [greedy(range(first, first + 4), 24) for first in range(10, 130, 20)]
    expected, rounds = arms.colocated.run(requests)
    with overwritten_before_it_is_read(arms.separate, from_round=4):
        completions, seeded = arms.separate.run(requests)
    assert seeded[:4] == rounds[:4]
    assert seeded != rounds
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    arms.compare(requests)


def test_an_abort_in_mid_stream(arms: Arms) -> None:
    requests = [greedy(MEDIUM, 60), greedy(SHORT, 60)]
    for arm in (arms.colocated, arms.separate):
        arm.forget()
        abort_after(arm, requests, deltas=5)
    assert arms.separate.rounds == arms.colocated.rounds
    arms.compare([greedy(MEDIUM[5:], 10), greedy(SHORT[1:], 9)])


def test_a_stop_string(arms: Arms) -> None:
    """Found by the front end in the middle of a round's tokens, after the draft has gone on."""
    whole, _ = arms.colocated.run([greedy(MEDIUM, 20)])
    stop = whole[0].text[5:8]
    stopped, _ = arms.compare([replace(greedy(MEDIUM, 20), stop=(stop,)), greedy(SHORT, 12)])
    assert stopped[0].finish_reason == "stop"
    assert stopped[0].text == whole[0].text[: whole[0].text.index(stop)]


def test_seeded_sampling(arms: Arms) -> None:
    """A draft that isn't the target's likeliest token is rejected by chance: the same chance in both arms."""
    shapes = [(SHORT, 0.3, 11), (MEDIUM, 1.0, 12), (SHORT, 1.0, 13), (MEDIUM, 0.0, None)]
    requests = [replace(greedy(prompt, 16), temperature=heat, seed=seed) for prompt, heat, seed in shapes]
    completions, rounds = arms.compare(requests)
    assert completions[0].token_ids != completions[2].token_ids
    assert any(row.num_rejected for row in all_rows(rounds))


def test_the_context_ends_within_a_proposal(arms: Arms) -> None:
    completions, _ = arms.compare([greedy(range(3, 253), 100)])
    assert len(completions[0].token_ids) == 256 - 250


def test_what_crosses_is_counted(arms: Arms) -> None:
    before = remote(arms.separate).times.rounds
    _, rounds = arms.compare([greedy(SHORT, 8)])
    times = remote(arms.separate).times
    assert times.rounds - before == len(rounds)
    assert 0 < times.draft < times.round_trip
    assert times.request_bytes > times.reply_bytes > 0


def test_a_draft_that_forgets_its_context(arms: Arms) -> None:
    """Its KV cache is zero from some round on: drafts change, nothing else. In short contexts it shows soon. What it
    maps is its target's, and isn't forgotten."""
    requests = [greedy(range(first, first + 4), 24) for first in range(10, 130, 20)]
    expected, rounds = arms.colocated.run(requests)
    arms.separate.forget()
    answers: list[list[int]] = [[] for _ in requests]
    forgotten = False
    for delta in arms.separate.engine.stream(requests):
        answers[delta.index].extend(delta.token_ids)
        if not forgotten and len(arms.separate.rounds) >= 4:
            separate_of(arms.separate).draft_process.send_signal(signal.SIGUSR1)
            forgotten = True
    assert [tuple(answer) for answer in answers] == [completion.token_ids for completion in expected]
    assert remote(arms.separate).lost is None
    assert arms.separate.rounds[:4] == rounds[:4]
    assert (arms.separate.rounds == rounds) == (arms.separate.contract.kv_sharing == "map")


def test_a_mirror_that_starts_again(arms: Arms) -> None:
    """A new process's mirror is empty: what runs, and what is cached, is computed again for it before it proposes."""
    if arms.separate.contract.kv_sharing != "mirror":
        pytest.skip("this draft keeps no mirror")
    requests = [greedy(range(400, 280, -1), 40), greedy(range(80, 60, -1), 30)]  # new: the last mirror was wiped
    arms.compare(requests)
    arms.colocated.engine.vllm_engine.reset_prefix_cache()
    expected, _ = arms.colocated.run(requests)
    separate_of(arms.separate).draft_process.kill()
    alone, _ = arms.separate.run(requests)
    await_draft(arms.separate)
    back, _ = arms.separate.run(requests)
    for completions in (alone, back):
        assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    again, _ = arms.compare(requests)
    assert again[0].num_cached_tokens >= 2 * BLOCK_SIZE


def test_a_target_whose_draft_has_gone(arms: Arms) -> None:
    """The last test of a pair. A round's proposal is then the last known token, for every family."""
    separate_of(arms.separate).stop_draft()
    assert separate_of(arms.separate).draft_process.returncode == 0
    requests = [greedy(MEDIUM, 10), greedy(SHORT, 8)]
    expected, _ = arms.colocated.run(requests)
    completions, rounds = arms.separate.run(requests)
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert {len(set(row.drafts)) for row in all_rows(rounds)} == {1}


def all_rows(rounds: list[Round]) -> list[Row]:
    return [row for one in rounds for row in one]


def was_preempted(rounds: list[Round], request: int) -> bool:
    """Whether it was absent from a round between its first and its last."""
    present = [any(row.request == request for row in one) for one in rounds]
    return not all(present[present.index(True) : len(present) - present[::-1].index(True)])


@contextmanager
def poisoned_blocks(arm: Arm) -> Iterator[list[int]]:
    """The ids of blocks that were overwritten."""
    vllm_engine = arm.engine.vllm_engine
    pool = vllm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    layers = vllm_engine.vllm_config.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for group in arm.contract.groups_of("target") for name in group.layers]
    get_new_blocks, free_blocks = pool.get_new_blocks, pool.free_blocks
    poisoned: list[int] = []

    def poison(blocks: Iterable[Any]) -> None:
        for block in blocks:
            poisoned.append(block.block_id)
            with torch.inference_mode():
                for cache in caches:
                    cache[block.block_id] = 1e4

    def get_poisoned(count: int) -> Any:
        blocks = get_new_blocks(count)
        poison(blocks)
        return blocks

    def free_poisoned(blocks: Iterable[Any], *more: Any, **options: Any) -> None:
        given_back = list(blocks)
        free_blocks(given_back, *more, **options)
        unused = {block.block_id: block for block in given_back if block.ref_cnt == 0 and not block.is_null}
        poison(block for block in unused.values() if block.block_hash is None)

    pool.get_new_blocks, pool.free_blocks = get_poisoned, free_poisoned
    try:
        yield poisoned
    finally:
        pool.get_new_blocks, pool.free_blocks = get_new_blocks, free_blocks


@contextmanager
def overwritten_before_it_is_read(arm: Arm, *, from_round: int) -> Iterator[None]:
    """From this round on each request's first block has what a new owner would write: in its pages while the draft
    reads them, or in the rows that go to its mirror."""
    speculator, layers = remote(arm), arm.engine.vllm_engine.vllm_config.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for group in arm.contract.groups_of("target") for name in group.layers]
    propose, stored = speculator.propose, speculator._stored

    def overwriting(batch: Any, *arguments: Any, **keywords: Any) -> Any:
        if len(arm.rounds) < from_round:
            return propose(batch, *arguments, **keywords)
        tables = [table[: batch.num_reqs, 0] for table in speculator._block_tables.input_block_tables]
        blocks = torch.cat(tables).unique().long()
        before = [cache[blocks] for cache in caches]
        with torch.inference_mode():
            for cache in caches:
                cache[blocks] = 1e4
        drafts = propose(batch, *arguments, **keywords)
        with torch.inference_mode():
            for cache, pages in zip(caches, before, strict=True):
                cache[blocks] = pages
        return drafts

    def taking(*arguments: Any) -> Any:
        rows = take(*arguments)
        return rows if len(arm.rounds) < from_round else tuple(torch.full_like(each, 1e4) for each in rows)

    speculator.propose = overwriting
    if stored is not None:
        take, stored.take = stored.take, taking
    try:
        yield
    finally:
        speculator.propose = propose
        if stored is not None:
            stored.take = take


def abort_after(arm: Arm, requests: list[GenerationRequest], *, deltas: int) -> None:
    stream = arm.engine.stream(requests)
    for _ in range(deltas):
        next(stream)
    stream.close()
