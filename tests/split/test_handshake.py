"""From a contract to the first round, and rounds between two threads: a peer that is gone, silent, or another."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dspark.v1.control_pb2 import ChannelAddress, RoundOptions

from cluster.channel import (
    ChannelClosed,
    ChannelError,
    ChannelUnavailable,
    DeadlineExceeded,
    offer_channel,
    open_channel,
)
from cluster.contract.errors import ContractError
from cluster.control.member import Member
from cluster.control.refusals import ControlError
from cluster.control.settings import MemberSettings
from cluster.errors import UserError
from cluster.speculation.handshake import round_sizes
from cluster.speculation.message_server import serve
from cluster.speculation.messages import (
    BlockTableSizes,
    MessageCodec,
    MessageError,
    NoProposal,
    NoProposalReason,
    ProposeReply,
    ProposeRequest,
    RoundSizes,
    max_reply_bytes,
    max_request_bytes,
)
from cluster.speculation.pace import Pace
from cluster.speculation.pairing import offer_rounds, open_rounds
from cluster.speculation.rounds import DraftClient, RoundTimes
from cluster.speculation.settings import RemoteDraftSettings
from tests.control import CONTRACT, coordinator, join, pair_up, together
from tests.split.test_channel import Peer

SIZES = RoundSizes(
    max_num_reqs=2,
    max_num_batched_tokens=16,
    max_model_len=64,
    num_speculative_tokens=3,
    num_prefill_lookahead=1,
    hidden_size=4,
    hidden_dtype="float32",
    vocab_size=10,
    block_tables=(BlockTableSizes(width=2, block_size=32, num_blocks=8),),
    with_input_ids=False,
)
DIGEST = "0f" * 32


class Pair:
    """Two ends of a channel, both in this process."""

    def __init__(self) -> None:
        offer = offer_channel("shm", max_send_bytes=max_request_bytes(SIZES), max_receive_bytes=max_reply_bytes(SIZES))
        opened = []
        opening = threading.Thread(target=lambda: opened.append(open_channel(offer.address, time.monotonic() + 10)))
        opening.start()
        self.channel = offer.accept(time.monotonic() + 10)
        opening.join()
        (self.draft_channel,) = opened


@pytest.fixture
def pair() -> Pair:
    return Pair()


class Doubling:
    """Drafts twice the last token, and once: that token again."""

    def propose(self, request: ProposeRequest) -> np.ndarray:
        first = request.last_sampled[request.idx_mapping]
        return np.tile(2 * first, (1, request.num_speculative_tokens))


def request(**changes: object) -> ProposeRequest:
    one = np.ones(1, np.int32)
    return replace(
        ProposeRequest(
            epoch=0,
            step=0,
            num_speculative_tokens=3,
            decode_graph_eligible=True,
            hidden_states=np.zeros((4, 4), np.float32),
            positions=np.arange(4),
            query_start_loc=np.array([0, 4], np.int32),
            idx_mapping=np.array([1]),
            num_scheduled_tokens=4 * one,
            seq_lens_cpu_upper_bound=4 * one,
            num_sampled=one,
            num_rejected=0 * one,
            last_sampled=np.array([[1], [4]]),
            next_prefill_tokens=np.zeros((1, 2), np.int32),
            temperature=np.zeros(2, np.float32),
            seeds=np.zeros(2, np.int64),
            block_tables=(np.array([[3, 0]], np.int32),),
        ),
        **changes,
    )


def served(pair: Pair, *, epoch: int = 1) -> threading.Thread:
    codec = MessageCodec(SIZES, DIGEST)
    thread = threading.Thread(target=lambda: serve(Doubling(), pair.draft_channel, codec, epoch=epoch), daemon=True)
    thread.start()
    return thread


def client(pair: Pair, *, epoch: int = 1, deadline_s: float = 10.0, digest: str = DIGEST) -> DraftClient:
    pace = Pace(deadline_s=deadline_s, stall_limit_s=None)
    return DraftClient(pair.channel, MessageCodec(SIZES, digest), epoch=epoch, pace=pace, times=RoundTimes())


def test_rounds_go_there_and_back_until_the_target_closes(pair: Pair) -> None:
    thread, draft = served(pair), client(pair)
    for _ in range(3):
        answer = draft.propose(request())
        assert isinstance(answer, ProposeReply)
        assert answer.draft_token_ids.tolist() == [[8, 8, 8]]
    assert draft.propose(request(num_speculative_tokens=0)).draft_token_ids.shape == (1, 0)
    assert draft.times.rounds == 4
    draft.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_draft_of_another_epoch_proposes_nothing(pair: Pair) -> None:
    served(pair, epoch=2)
    answer = client(pair, epoch=1).propose(request())
    assert isinstance(answer, NoProposal)
    assert answer.reason is NoProposalReason.STALE_EPOCH


def test_a_draft_under_another_contract_is_no_peer(pair: Pair) -> None:
    served(pair)
    with pytest.raises(MessageError):
        client(pair, digest="1e" * 32).propose(request())


def test_a_silent_draft_costs_the_deadline_and_no_more(pair: Pair) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client(pair, deadline_s=0.3).propose(request())
    assert 0.3 <= time.monotonic() - begun < 2.0


def test_a_round_that_is_waited_for_can_be_ended_from_another_thread(pair: Pair) -> None:
    """As the member's thread does, when the coordinator says that the draft is silent."""
    draft = client(pair, deadline_s=60.0)
    threading.Timer(0.2, draft.abort).start()
    begun = time.monotonic()
    with pytest.raises(ChannelClosed):
        draft.propose(request())
    assert time.monotonic() - begun < 10


def test_a_round_beyond_the_agreed_sizes_is_refused_before_it_is_sent(pair: Pair) -> None:
    with pytest.raises(MessageError, match="last_sampled is"):
        client(pair).propose(request(last_sampled=np.zeros((5, 1), np.int64)))


OPTIONS = RoundOptions(block_table_widths=[2560], num_prefill_lookahead=1, with_input_ids=True)
SETTINGS = RemoteDraftSettings(member=MemberSettings(address="", role="target", name="target"))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[tuple[Member, Member]]:
    """A target and a draft that both hold what the contract says."""
    with coordinator(tmp_path) as address, join(address, "target") as target, join(address, "draft") as draft:
        pair_up(target, draft)
        yield target, draft


def test_both_sides_open_one_channel_with_one_idea_of_its_messages(members: tuple[Member, Member]) -> None:
    target, draft = members
    (offered, _), (channel, codec) = together(
        lambda: offer_rounds(SETTINGS, target, CONTRACT, OPTIONS), lambda: open_rounds(draft, CONTRACT, [2560])
    )
    sizes = round_sizes(CONTRACT, OPTIONS)
    assert codec.max_encoded_bytes == MessageCodec(sizes, CONTRACT.digest).max_encoded_bytes
    assert (sizes.hidden_size, sizes.max_num_reqs, sizes.with_input_ids) == (4096, 256, True)
    assert [(t.width, t.block_size, t.num_blocks) for t in sizes.block_tables] == [(2560, 16, CONTRACT.num_blocks)]
    offered.close()
    with pytest.raises(ChannelError):
        channel.recv(memoryview(bytearray(codec.max_encoded_bytes)), time.monotonic() + 10)
    channel.close()


def test_block_tables_of_another_width_are_refused_on_both_sides(members: tuple[Member, Member]) -> None:
    target, draft = members

    def open_narrow() -> str:
        with pytest.raises(ContractError) as refused, draft.reporting():
            open_rounds(draft, CONTRACT, [1024])
        return str(refused.value)

    def offer() -> str:
        with pytest.raises(ContractError) as refused:
            offer_rounds(SETTINGS, target, CONTRACT, OPTIONS)
        return str(refused.value)

    texts = together(offer, open_narrow)
    assert texts[0] == texts[1]
    assert texts[0].startswith("block_table_widths is (2560,) on the target and (1024,) on the draft: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_draft_that_can_not_reach_the_target_s_gpu_says_so_to_both(members: tuple[Member, Member]) -> None:
    target, draft = members
    ring = {"kind": "shm", "location": "x", "num_slots": 2, "max_bytes_from_offerer": 1, "max_bytes_from_opener": 1}
    location = json.dumps({"gpu": "GPU-0", "handle": "", "flags": "x", "ring": ring})
    address = ChannelAddress(
        kind="cuda_ipc", location=location, num_slots=2, max_bytes_from_offerer=1, max_bytes_from_opener=1
    )

    def open_here() -> str:
        with pytest.raises(ChannelUnavailable) as refused, draft.reporting():
            open_rounds(draft, CONTRACT, [2560])
        return str(refused.value)

    def offer() -> str:
        with pytest.raises(UserError) as refused:
            target.offer_channel(address, OPTIONS)
        return str(refused.value)

    texts = together(offer, open_here)
    assert texts[1] == "the cuda_ipc channel: this process has no GPU; use the shm channel"
    assert texts[0] == texts[1]


def test_a_target_that_dies_while_its_draft_opens_the_channel_is_a_lost_one(members: tuple[Member, Member]) -> None:
    """Not a channel that can't be had, which would end a draft that can serve the next one."""
    target, draft = members
    with Peer("offer") as peer:
        offered = json.loads(str(peer.read()["address"]))

    def open_here() -> str:
        with pytest.raises(ControlError) as lost:
            open_rounds(draft, CONTRACT, [2560])
        return str(lost.value)

    _, text = together(lambda: target.offer_channel(ChannelAddress(**offered), OPTIONS), open_here)
    assert text.startswith("the shm channel between target and draft: it didn't open (")
    assert "the process that offered it has ended" in text


def test_a_draft_whose_target_dies_before_it_loads_ends_and_says_so(tmp_path: Path) -> None:
    with coordinator(tmp_path) as address:
        member = MemberSettings(address=address, role="draft", name="draft-7")
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.speculation.draft_process"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[write],
            text=True,
        )
        start = {"settings": {"member": asdict(member), "engine_args": {}}, "acknowledgement": write}
        assert process.stdin is not None
        process.stdin.write(json.dumps(start) + "\n")
        process.stdin.flush()
        assert os.read(read, 1)
    assert process.stderr is not None
    said = process.stderr.read()
    process.wait(60)
    process.stdin.close()
    process.stderr.close()
    os.close(read)
    os.close(write)
    assert process.returncode == 2
    assert said.splitlines()[0] == "draft-7 waits for its target"
    assert "draft-7 stops: draft-7 waited for a target to join: the coordinator at" in said
