"""Faults between target and draft: whatever becomes of a message, the target's round ends, and what it takes for a
proposal is one. Real ends, the real channel between two threads, and no model."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cluster.channel import Channel, ChannelError, offer_channel, open_channel
from cluster.channel.faults import Faults, FaultsConfig, MessageFault
from cluster.config import ClusterConfig
from cluster.contract.codec import from_plain
from cluster.contract.errors import DocumentError
from cluster.speculation.draft_rounds import serve_rounds
from cluster.speculation.messages import MessageError, max_reply_bytes, max_request_bytes
from cluster.speculation.pace import Pace
from cluster.speculation.rounds import RoundTimes
from cluster.speculation.target_rounds import TargetRounds, target_rounds
from tests.rounds import CODEC, CPU, DEADLINE_S, SIZES, K, Recording, drafts_of, round_of

STALL_LIMIT_S = 0.3
ROUNDS = 12

Start = Callable[..., tuple[TargetRounds, Recording]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A target with these faults on its way to a draft without a model."""
    started: list[TargetRounds] = []

    def start_one(*faults: MessageFault, deadline_s: float = DEADLINE_S) -> tuple[TargetRounds, Recording]:
        offer = offer_channel("shm", max_send_bytes=max_request_bytes(SIZES), max_receive_bytes=max_reply_bytes(SIZES))
        draft = Recording()

        def serve() -> None:
            with open_channel(offer.address, time.monotonic() + DEADLINE_S) as theirs:
                serve_rounds(draft, theirs, CODEC, epoch=1)  # type: ignore[arg-type]

        threading.Thread(target=serve, daemon=True).start()
        ours: Channel = offer.accept(time.monotonic() + DEADLINE_S)
        channel = Faults(FaultsConfig(messages=faults), "target").around(ours)
        pace = Pace(deadline_s=deadline_s, stall_limit_s=STALL_LIMIT_S)
        started.append(target_rounds(channel, CODEC, epoch=1, pace=pace, device=CPU, times=RoundTimes()))
        return started[-1], draft

    yield start_one
    for rounds in started:
        rounds.close()


def propose(rounds: TargetRounds, seed: int) -> str:
    """What came: "drafts", or the last tokens where there was no proposal."""
    round, tables = round_of([3, 1], seed=seed)
    drafts, last = drafts_of(2), round.last_sampled[round.idx_mapping]
    rounds.propose(round, tables, drafts)
    if torch.equal(drafts, last.expand(2, K)):
        return "last"
    assert torch.equal(drafts, last + torch.arange(10, 10 + K))
    return "drafts"


@pytest.mark.parametrize("message", ["request", "reply"])
@pytest.mark.parametrize("action", ["duplicate", "reorder"])
def test_messages_that_come_again_are_dropped(start: Start, message: Any, action: Any) -> None:
    rounds, draft = start(MessageFault(message=message, action=action, nth=2, every=3))
    assert [propose(rounds, seed) for seed in range(ROUNDS)] == ["drafts"] * ROUNDS
    assert len(draft.came) == ROUNDS, "the draft takes in no round twice"


@pytest.mark.parametrize("message", ["request", "reply"])
def test_a_truncated_message_is_one_round_without_a_proposal(start: Start, message: Any) -> None:
    rounds, _ = start(MessageFault(message=message, action="truncate", nth=2, every=3))
    expected = ["last" if seed % 3 == 1 else "drafts" for seed in range(ROUNDS)]
    assert [propose(rounds, seed) for seed in range(ROUNDS)] == expected


@pytest.mark.parametrize("message", ["request", "reply"])
def test_a_dropped_message_ends_the_pair_within_the_stall_limit(start: Start, message: Any) -> None:
    rounds, _ = start(MessageFault(message=message, action="drop", nth=8))
    assert [propose(rounds, seed) for seed in range(7)] == ["drafts"] * 7
    begun = time.monotonic()
    with pytest.raises(ChannelError):
        propose(rounds, 8)
    assert STALL_LIMIT_S <= time.monotonic() - begun < DEADLINE_S / 2


def test_rounds_of_an_unknown_size_have_the_whole_deadline(start: Start) -> None:
    rounds, _ = start(MessageFault(message="reply", action="delay", nth=1, seconds=2 * STALL_LIMIT_S))
    assert propose(rounds, 0) == "drafts"


def test_nothing_passes_while_the_network_is_cut(start: Start) -> None:
    rounds, draft = start(MessageFault(message="request", action="cut", nth=1, seconds=60), deadline_s=0.1)
    with pytest.raises(ChannelError):
        propose(rounds, 0)
    assert not draft.came


def test_corrupt_bytes_are_never_a_token_beyond_the_vocabulary(start: Start) -> None:
    """Any other token is as good as a draft's: the target verifies it."""
    rounds, _ = start(MessageFault(message="reply", action="corrupt", every=1), deadline_s=1.0)
    for seed in range(100):
        round, tables = round_of([3, 1], seed=seed)
        drafts = drafts_of(2)
        try:
            rounds.propose(round, tables, drafts)
        except (ChannelError, MessageError):
            return  # the byte was one of the header, and the pair begins again
        assert ((drafts >= 0) & (drafts < SIZES.vocab_size)).all()


def test_a_draft_warms_up_before_it_has_a_round(start: Start) -> None:
    rounds, draft = start()
    rounds.warm_up()
    assert len(draft.came) == 3
    assert rounds.times.rounds == 0
    assert propose(rounds, 0) == "drafts"


def test_faults_are_no_part_of_production() -> None:
    plain = {"model": {"target": "t"}, "faults": {"messages": [{"message": "request", "action": "drop"}]}}
    faults = from_plain(ClusterConfig, plain).faults
    assert faults is not None
    assert faults.messages[0].nth == 1
    with pytest.raises(DocumentError, match="production"):
        from_plain(ClusterConfig, plain | {"production": True})
    with pytest.raises(DocumentError, match="seconds"):
        MessageFault(message="reply", action="delay")
