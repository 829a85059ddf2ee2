"""Before the first round: what either side says when the other is gone, silent, or another than it thinks."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cluster.speculation.control import ControlLine, HandshakeError

from cluster.channel import DeadlineExceeded, offer_channel, open_channel
from cluster.errors import UserError
from cluster.speculation import control
from cluster.speculation.draft_process import serve
from cluster.speculation.handshake import EngineSizes, PoolSizes
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
from cluster.speculation.pairing import Pairing
from cluster.speculation.rounds import DraftClient
from cluster.speculation.settings import RemoteDraftSettings

ENGINE = EngineSizes(
    max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, block_size=32, num_speculative_tokens=3
)
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
    draft_logits_dtype=None,
)
DIGEST = "0f" * 32


class Pair:
    """Two control lines and two ends of a channel, all in this process."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "line")
        with control.listen(address) as listener:
            self.target = control.connect(address)
            self.draft = control.accept(listener)
        offer = offer_channel("shm", max_send_bytes=max_request_bytes(SIZES), max_receive_bytes=max_reply_bytes(SIZES))
        opened = []
        opening = threading.Thread(target=lambda: opened.append(open_channel(offer.address, time.monotonic() + 10)))
        opening.start()
        self.channel = offer.accept(time.monotonic() + 10)
        opening.join()
        (self.draft_channel,) = opened


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


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
    return DraftClient(pair.channel, MessageCodec(SIZES, digest), epoch=epoch, deadline_s=deadline_s)


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


def test_a_round_beyond_the_agreed_sizes_is_refused_before_it_is_sent(pair: Pair) -> None:
    with pytest.raises(MessageError, match="last_sampled is"):
        client(pair).propose(request(last_sampled=np.zeros((5, 1), np.int64)))


def test_a_refusal_is_raised_where_it_is_awaited(pair: Pair) -> None:
    pair.draft.refuse(UserError("the draft", "it has no room", "give it some"))
    with pytest.raises(HandshakeError, match="it has no room; give it some"):
        pair.target.receive(PoolSizes, timeout_s=10)


def test_another_document_than_is_due_is_named(pair: Pair) -> None:
    pair.draft.send(ENGINE)
    with pytest.raises(HandshakeError, match="EngineSizes where PoolSizes was due"):
        pair.target.receive(PoolSizes, timeout_s=10)


def test_silence_and_absence_are_told_apart(pair: Pair) -> None:
    with pytest.raises(HandshakeError, match="no PoolSizes in 0 s"):
        pair.target.receive(PoolSizes, timeout_s=0.1)
    pair.draft.close()
    with pytest.raises(HandshakeError, match="has ended"):
        pair.target.receive(PoolSizes, timeout_s=10)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(HandshakeError, match="nobody listens at"):
        Pairing(RemoteDraftSettings(address=str(tmp_path / "nowhere")), ENGINE)


def test_a_draft_whose_target_dies_before_the_first_word_ends_and_says_so(tmp_path: Path) -> None:
    address = str(tmp_path / "line")
    with control.listen(address) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.speculation.draft_process"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            text=True,
        )
        settings = {"name": "draft 7", "listener": listener.fileno(), "engine_args": {}}
    line: ControlLine = control.connect(address)
    line.close()
    _, said = process.communicate(json.dumps(settings), timeout=60)
    assert process.returncode == 2
    assert said.splitlines()[0] == "draft 7 waits for its target"
    assert "draft 7 stops: the target's side can't be paired: its process has ended" in said
