"""Rounds between two sides with buffers of their own, as with NCCL, for which gloo stands here: only what a round has
travels, on a side stream (a thread) that sets REPLY; the target's own stream waits for that word alone."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from cluster.engine.cpu import profile

if not profile.is_cpu_installation():
    pytest.skip("on a GPU the same goes through NCCL", allow_module_level=True)

profile.install()

from cluster.channel import ChannelUnavailable, PeerDied, offer_channel  # noqa: E402
from cluster.channel.base import LOOPBACK  # noqa: E402
from cluster.channel.gloo_group import GlooGroup, GlooRendezvous, join  # noqa: E402
from cluster.speculation.draft_rounds import DeviceDraft  # noqa: E402
from cluster.speculation.pace import Pace  # noqa: E402
from cluster.speculation.rounds import RoundTimes  # noqa: E402
from cluster.speculation.target_rounds import DeviceRounds  # noqa: E402
from tests.rounds import (  # noqa: E402
    CODEC,
    CPU,
    DEADLINE_S,
    CpuDeviceChannel,
    K,
    Notices,
    Recording,
    drafts_of,
    round_of,
    tensors_of,
)

PACE = Pace(deadline_s=DEADLINE_S, stall_limit_s=None)


class Side(CpuDeviceChannel):
    """One of the two. The group's header carries nothing; the payload must be as long as the other side says."""

    def __init__(self, group: GlooGroup, notices: Notices) -> None:
        super().__init__(notices)
        self.side_stream = ThreadPoolExecutor(1)
        self._group = group
        self._header = torch.zeros(2, dtype=torch.int64)

    def close(self) -> None:
        self.side_stream.shutdown()

    def request(self, step: int, num_bytes: int, reply_bytes: int) -> None:
        self.exchange = self.side_stream.submit(self._exchange, step, num_bytes, reply_bytes)
        self._requested = step

    def await_request(self, step: int, num_bytes: int) -> None:  # noqa: ARG002
        self._receive(self.request_buffer[:num_bytes])

    def reply(self, step: int, num_bytes: int) -> None:
        super().reply(step, num_bytes)
        self._group.send(self._header, self.reply_buffer[:num_bytes])

    def release(self, step: int) -> None:
        super().release(step)
        self._group.break_connection()

    def synchronize(self) -> None:
        self.side_stream.shutdown()

    def _exchange(self, step: int, num_bytes: int, reply_bytes: int) -> None:
        self._group.send(self._header, self.request_buffer[:num_bytes])
        self._receive(self.reply_buffer[:reply_bytes])
        self._replied = step

    def _receive(self, payload: torch.Tensor) -> None:
        self._group.receive_header(self._header)
        self._group.receive_payload(payload)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    deadline_s = time.monotonic() + DEADLINE_S
    rendezvous, notices = GlooRendezvous(LOOPBACK), Notices()
    with ThreadPoolExecutor(1) as opener:
        other: Future[GlooGroup] = opener.submit(join, rendezvous.location, LOOPBACK, deadline_s)
        target = Side(rendezvous.accept(deadline_s), notices)
        draft = Side(other.result(), notices)
    yield target, draft
    draft.side_stream.shutdown()


def test_what_a_round_has_is_enough(sides: tuple[Side, Side]) -> None:
    target_side, draft_side = sides
    hosted = Recording()
    server = DeviceDraft(hosted, draft_side, CODEC, epoch=1)  # type: ignore[arg-type]
    serving = threading.Thread(target=server.serve)
    serving.start()
    target = DeviceRounds(target_side, CODEC, epoch=1, pace=PACE, device=CPU, times=RoundTimes())
    for seed, lengths in enumerate([[5, 4, 4, 3], [1], [4, 1, 2]]):
        draft_side.request_buffer.fill_(0xFF)
        round, tables = round_of(lengths, seed=seed)
        drafts = drafts_of(len(lengths))
        target.propose(round, tables, drafts)
        for name, tensor in hosted.came[-1].items():
            assert torch.equal(tensor, tensors_of(round)[name]), name
        assert torch.equal(drafts, round.last_sampled[round.idx_mapping] + torch.tensor([10, 11, 12]))
        assert len(lengths) == 4 or (draft_side.request_buffer[-64:] == 0xFF).all()
    target.close()
    serving.join(DEADLINE_S)
    assert not serving.is_alive()


def test_a_draft_that_is_gone_holds_up_neither_stream(sides: tuple[Side, Side]) -> None:
    """It has taken the request, and dies."""
    target_side, _ = sides
    target = DeviceRounds(target_side, CODEC, epoch=1, pace=PACE, device=CPU, times=RoundTimes())
    threading.Timer(0.1, setattr, (target_side, "lost", PeerDied("ended"))).start()
    round, tables = round_of([2, 1])
    drafts = drafts_of(2)
    target.propose(round, tables, drafts)
    assert torch.equal(drafts, round.last_sampled[round.idx_mapping].expand(2, K))
    assert isinstance(target_side.exchange.exception(DEADLINE_S), RuntimeError)
    with pytest.raises(PeerDied):
        target.propose(round, tables, drafts)
    target.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(ChannelUnavailable, match=r"the nccl channel: this process has no GPU; use the gloo channel"):
        offer_channel("nccl", max_send_bytes=64, max_receive_bytes=64, max_notice_bytes=64)
