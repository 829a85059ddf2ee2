"""Rounds between two processes through CUDA IPC, and NCCL. Needs a GPU; takes two where there are two, for NCCL."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from cluster.channel import (
    ChannelAddress,
    ChannelError,
    ChannelKind,
    ChannelUnavailable,
    DeadlineExceeded,
    check_channel,
    offer_channel,
    open_channel,
)
from cluster.channel.device import DeviceChannel
from cluster.speculation.draft_rounds import DeviceDraft
from cluster.speculation.messages import max_notice_bytes, max_reply_bytes, max_request_bytes
from cluster.speculation.pace import Pace
from cluster.speculation.round import Round
from cluster.speculation.rounds import RoundTimes
from cluster.speculation.target_rounds import DeviceRounds
from tests.rounds import CODEC, DEADLINE_S, SIZES, Adding, K, drafts_of, round_of

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
START_TIMEOUT_S = 120.0
STALL_LIMIT_S = 0.15
PACED = 5
"""Rounds of a size, after which it is known."""

CYCLES_A_SECOND = 2_000_000_000
"""At most."""

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
on_each_way = pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param("cuda_ipc", 0, id="cuda_ipc on one GPU"),
        pytest.param("cuda_ipc", 1, id="cuda_ipc", marks=needs_two),
        pytest.param("nccl", 1, id="nccl", marks=needs_two),
    ],
)


class Sleeping(Adding):
    """Its stream stands still for a while in each round."""

    def __init__(self, device: torch.device, cycles: int) -> None:
        super().__init__(device)
        self._cycles = cycles

    def propose(self, round: Round) -> torch.Tensor:
        torch.cuda._sleep(self._cycles)
        return super().propose(round)


def serve(address: str, device: int, cycles: int, hello: Connection) -> None:
    """The draft's process."""
    torch.cuda.set_device(device)
    channel = open_channel(ChannelAddress.from_json(address), time.monotonic() + START_TIMEOUT_S)
    assert isinstance(channel, DeviceChannel)
    hello.send_bytes(b"ready")
    hosted = Sleeping(torch.device("cuda", device), cycles)
    DeviceDraft(hosted, channel, CODEC, epoch=1).serve()  # type: ignore[arg-type]
    os._exit(0)


@dataclass
class Pair:
    target: DeviceRounds
    draft: BaseProcess


Start = Callable[..., Pair]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a draft on the GPU with this number, which sleeps for so many cycles a round."""
    pairs: list[Pair] = []

    def start_one(kind: ChannelKind, device: int, cycles: int = 1, stall_limit_s: float | None = None) -> Pair:
        torch.cuda.set_device(GPU)
        offer = offer_channel(
            kind,
            max_send_bytes=max_request_bytes(SIZES),
            max_receive_bytes=max_reply_bytes(SIZES),
            max_notice_bytes=max_notice_bytes(SIZES),
        )
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        draft = context.Process(target=serve, args=(offer.address.to_json(), device, cycles, theirs), daemon=True)
        draft.start()
        channel = offer.accept(time.monotonic() + START_TIMEOUT_S)
        assert ours.poll(START_TIMEOUT_S)
        assert isinstance(channel, DeviceChannel)
        pace = Pace(deadline_s=DEADLINE_S, stall_limit_s=stall_limit_s)
        pair = Pair(DeviceRounds(channel, CODEC, epoch=1, pace=pace, device=GPU, times=RoundTimes()), draft)
        pairs.append(pair)
        return pair

    yield start_one
    for pair in pairs:
        pair.target.close()
        pair.draft.join(DEADLINE_S)


@on_each_way
def test_replies_come_back_from_the_draft_s_gpu(start: Start, kind: ChannelKind, device: int) -> None:
    target = start(kind, device).target
    for seed, lengths in enumerate([[4, 1, 2], [1], [5, 4, 4, 3]] * 10):
        round, tables = round_of(lengths, seed=seed, device=GPU)
        drafts = drafts_of(len(lengths), GPU)
        target.propose(round, tables, drafts)
        assert torch.equal(drafts, round.last_sampled[round.idx_mapping] + torch.tensor([10, 11, 12], device=GPU))


@on_each_way
def test_the_target_does_not_wait_for_the_device(start: Start, kind: ChannelKind, device: int) -> None:
    target = start(kind, device).target
    round, tables = round_of([4, 4], device=GPU)
    target.propose(round, tables, drafts_of(2, GPU))  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the stream
    begun = time.monotonic()
    target.propose(round, tables, drafts_of(2, GPU))
    assert time.monotonic() - begun < 0.1
    assert not torch.cuda.current_stream().query()


@on_each_way
def test_the_stream_goes_on_within_200_ms_of_the_draft_s_death(start: Start, kind: ChannelKind, device: int) -> None:
    pair = start(kind, device)
    round, tables = round_of([4, 4], device=GPU)
    pair.target.propose(round, tables, drafts_of(2, GPU))
    torch.cuda.synchronize()
    assert pair.draft.pid is not None
    os.kill(pair.draft.pid, signal.SIGSTOP)  # so that there is no reply to the next round
    drafts = drafts_of(2, GPU)
    pair.target.propose(round, tables, drafts)
    begun = time.monotonic()
    os.kill(pair.draft.pid, signal.SIGKILL)
    torch.cuda.current_stream().synchronize()
    assert time.monotonic() - begun < 0.2
    torch.cuda.synchronize()  # the side stream of NCCL, which is aborted
    assert time.monotonic() - begun < DEADLINE_S
    assert torch.equal(drafts, round.last_sampled[round.idx_mapping].expand(2, K))
    with pytest.raises(ChannelError):
        pair.target.propose(round, tables, drafts)


def proposed(target: DeviceRounds) -> tuple[bool, float | None]:
    """Whether the draft's tokens came, once they had to, and what it was waited for."""
    round, tables = round_of([4, 4], device=GPU)
    drafts, last = drafts_of(2, GPU), round.last_sampled[round.idx_mapping]
    waited_s = target.propose(round, tables, drafts)
    torch.cuda.current_stream().synchronize()
    if torch.equal(drafts, last.expand(2, K)):
        return False, waited_s
    assert torch.equal(drafts, last + torch.tensor([10, 11, 12], device=GPU))
    return True, waited_s


@on_each_way
def test_a_draft_that_hangs_is_let_go_by_the_pace_of_its_rounds(start: Start, kind: ChannelKind, device: int) -> None:
    pair = start(kind, device, stall_limit_s=STALL_LIMIT_S)
    for _ in range(PACED):
        assert proposed(pair.target)[0]
    assert pair.draft.pid is not None
    os.kill(pair.draft.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert not proposed(pair.target)[0]
    assert STALL_LIMIT_S <= time.monotonic() - begun < 0.2
    with pytest.raises(DeadlineExceeded, match=f"no reply to round {PACED + 1}"):
        proposed(pair.target)
    pair.draft.kill()


@on_each_way
def test_neither_does_the_target_s_cpu_wait_for_a_draft_that_hangs(
    start: Start, kind: ChannelKind, device: int
) -> None:
    """It is ahead of its stream, and the draft has room for two notices."""
    pair = start(kind, device, stall_limit_s=STALL_LIMIT_S)
    for _ in range(PACED):
        assert proposed(pair.target)[0]
    assert pair.draft.pid is not None
    os.kill(pair.draft.pid, signal.SIGSTOP)
    round, tables = round_of([4, 4], device=GPU)

    def run_ahead() -> None:
        for _ in range(4):
            pair.target.propose(round, tables, drafts_of(2, GPU))

    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"no reply to round {PACED + 1}"):
        run_ahead()
    torch.cuda.current_stream().synchronize()
    assert time.monotonic() - begun < 0.3
    pair.draft.kill()


@on_each_way
def test_a_draft_that_is_slow_and_steady_is_kept(start: Start, kind: ChannelKind, device: int) -> None:
    target = start(kind, device, cycles=round(0.3 * CYCLES_A_SECOND), stall_limit_s=STALL_LIMIT_S).target
    waits = []
    for _ in range(PACED + 3):
        was_there, waited_s = proposed(target)
        assert was_there
        waits.append(waited_s)
    assert waits[0] is None
    assert all(waited_s is not None and waited_s > STALL_LIMIT_S for waited_s in waits[PACED:])
    assert target.times.wait > STALL_LIMIT_S * (PACED + 2)


@on_each_way
def test_the_target_s_own_step_is_not_taken_for_a_draft_that_hangs(
    start: Start, kind: ChannelKind, device: int
) -> None:
    """Nor for a wait, by the stream's clock."""
    target = start(kind, device, stall_limit_s=STALL_LIMIT_S).target
    for _ in range(PACED):
        assert proposed(target)[0]
    for _ in range(2):
        torch.cuda._sleep(CYCLES_A_SECOND)
        was_there, waited_s = proposed(target)
        assert was_there
    assert waited_s is not None
    assert waited_s < STALL_LIMIT_S


@on_each_way
def test_rounds_that_are_closed_may_be_aborted(start: Start, kind: ChannelKind, device: int) -> None:
    target = start(kind, device).target
    assert proposed(target)[0]
    target.close()
    target.abort()


@on_each_way
def test_ten_thousand_rounds_take_no_memory(start: Start, kind: ChannelKind, device: int) -> None:
    """Nothing else may run on these GPUs meanwhile: what is free on them is looked at."""
    target = start(kind, device).target
    round, tables = round_of([4, 4], device=GPU)
    drafts = drafts_of(2, GPU)
    free, descriptors = set(), set()
    for batch in range(11):
        for _ in range(1_000):
            target.propose(round, tables, drafts)
        torch.cuda.synchronize()
        if batch:
            free.add(tuple(torch.cuda.mem_get_info(each)[0] for each in {0, device}))
            descriptors.add(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    assert len(free) == 1
    assert len(descriptors) == 1


def test_a_gpu_that_is_not_seen_is_refused() -> None:
    offer = offer_channel("cuda_ipc", max_send_bytes=64, max_receive_bytes=64, max_notice_bytes=64)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    address = offer.address.to_json().replace(uuid, "00000000-0000-0000-0000-000000000000")
    with pytest.raises(ChannelUnavailable, match="CUDA_VISIBLE_DEVICES must name both"):
        check_channel(ChannelAddress.from_json(address))
    offer.withdraw()


def test_nccl_on_one_gpu_is_refused() -> None:
    offer = offer_channel("nccl", max_send_bytes=64, max_receive_bytes=64, max_notice_bytes=64)
    with pytest.raises(ChannelUnavailable, match="NCCL refuses two ranks on one GPU; give the draft a GPU of its own"):
        check_channel(offer.address)
    offer.withdraw()


@needs_two
def test_a_draft_that_does_not_come_to_the_nccl_group_is_waited_for_until_the_deadline() -> None:
    """It opens what goes beside, and stops."""
    torch.cuda.set_device(GPU)
    offer = offer_channel("nccl", max_send_bytes=64, max_receive_bytes=64, max_notice_bytes=64)
    beside = ChannelAddress.from_json(json.dumps(json.loads(offer.address.location)["beside"]))
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    opener = context.Process(target=open_and_stop, args=(beside.to_json(), theirs), daemon=True)
    opener.start()
    assert ours.poll(START_TIMEOUT_S)
    with pytest.raises(DeadlineExceeded, match="didn't join the NCCL group"):
        offer.accept(time.monotonic() + 3)
    opener.kill()
    opener.join()


def open_and_stop(address: str, hello: Connection) -> None:
    with open_channel(ChannelAddress.from_json(address), time.monotonic() + DEADLINE_S):
        hello.send_bytes(b"ready")
        signal.pause()
