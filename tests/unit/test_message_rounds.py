"""Rounds as messages: real ends of target and draft, the real channel between two threads, and no model."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from cluster.channel import Channel, offer_channel, open_channel
from cluster.speculation.draft_rounds import serve_rounds
from cluster.speculation.messages import max_reply_bytes, max_request_bytes
from cluster.speculation.pace import Pace
from cluster.speculation.rounds import RoundTimes
from cluster.speculation.target_rounds import TargetRounds, target_rounds
from tests.rounds import CODEC, CPU, DEADLINE_S, SIZES, K, Recording, drafts_of, round_of, tensors_of


@pytest.fixture
def channels() -> tuple[Channel, Channel]:
    """The target's end, and the draft's."""
    offer = offer_channel("shm", max_send_bytes=max_request_bytes(SIZES), max_receive_bytes=max_reply_bytes(SIZES))
    opened: list[Channel] = []
    deadline_s = time.monotonic() + DEADLINE_S
    opening = threading.Thread(target=lambda: opened.append(open_channel(offer.address, deadline_s)))
    opening.start()
    ours = offer.accept(deadline_s)
    opening.join()
    return ours, opened[0]


@pytest.fixture
def target(channels: tuple[Channel, Channel]) -> Iterator[TargetRounds]:
    pace = Pace(deadline_s=DEADLINE_S, stall_limit_s=None)
    rounds = target_rounds(channels[0], CODEC, epoch=1, pace=pace, device=CPU, times=RoundTimes())
    yield rounds
    rounds.close()


def serve(hosted: Recording, channel: Channel, epoch: int = 1) -> None:
    thread = threading.Thread(target=serve_rounds, args=(hosted, channel, CODEC), kwargs={"epoch": epoch}, daemon=True)
    thread.start()


def test_a_round_arrives_as_it_was_sent_and_so_does_its_reply(
    target: TargetRounds, channels: tuple[Channel, Channel]
) -> None:
    draft = Recording()
    serve(draft, channels[1])
    for seed, lengths in enumerate([[4, 1, 2], [1], [5, 4, 4, 3]]):
        round, tables = round_of(lengths, seed=seed, wanted=K - seed)
        drafts = drafts_of(len(lengths))
        target.propose(round, tables, drafts)
        for name, tensor in draft.came[-1].items():
            assert torch.equal(tensor, tensors_of(round)[name]), name
        for own, sent in zip(draft.block_tables, tables, strict=True):
            assert all(torch.equal(table[: len(lengths)], sent) for table in own)
        more = torch.tensor([10, 11, 12]) * (torch.arange(K) < K - seed)
        assert torch.equal(drafts, round.last_sampled[round.idx_mapping] + more)
    assert target.times.rounds == 3


def test_a_draft_with_no_proposal_leaves_the_last_tokens(
    target: TargetRounds, channels: tuple[Channel, Channel]
) -> None:
    serve(Recording(), channels[1], epoch=2)
    round, tables = round_of([2, 1])
    drafts = drafts_of(2)
    target.propose(round, tables, drafts)
    assert torch.equal(drafts, round.last_sampled[round.idx_mapping].expand(2, K))
