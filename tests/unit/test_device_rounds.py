"""Rounds through device memory, without a GPU: the real kernels under Triton's interpreter, the real ends of target and
draft, and between them a channel whose streams do everything at once, in the thread that asks."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.cpu import profile

if not profile.is_cpu_installation():
    pytest.skip("on a GPU the same goes through CUDA IPC", allow_module_level=True)

profile.install()

from cluster.channel import ChannelClosed, ChannelError, DeadlineExceeded, PeerDied  # noqa: E402
from cluster.channel.device import has_reached  # noqa: E402
from cluster.speculation.device_kernels import Copier, Copy, take_reply  # noqa: E402
from cluster.speculation.draft_rounds import DeviceDraft  # noqa: E402
from cluster.speculation.messages import (  # noqa: E402
    DeviceLayout,
    MessageError,
    RoundNotice,
    max_notice_bytes,
    max_request_bytes,
)
from cluster.speculation.pace import Pace  # noqa: E402
from cluster.speculation.round import Round  # noqa: E402
from cluster.speculation.rounds import RoundTimes  # noqa: E402
from cluster.speculation.stream_waits import StreamWaits  # noqa: E402
from cluster.speculation.target_rounds import DeviceRounds, _kind_of, target_rounds  # noqa: E402
from cluster.speculation.watch import WATCH_INTERVAL_S, RoundWatch  # noqa: E402
from tests.rounds import (  # noqa: E402
    CODEC,
    CPU,
    DEADLINE_S,
    SIZES,
    Adding,
    CpuDeviceChannel,
    CpuEvent,
    K,
    Notices,
    Recording,
    drafts_of,
    round_of,
    tensors_of,
    wait_until,
)

STALL_LIMIT_S = 0.3
PACED = 5
"""Rounds of a size, after which it is known."""


class EagerChannel(CpuDeviceChannel):
    """Both ends at once, as with CUDA IPC."""

    def __init__(self) -> None:
        super().__init__(Notices())

    def close(self) -> None:
        self.abort()

    def request(self, step: int, num_bytes: int, reply_bytes: int) -> None:  # noqa: ARG002
        self._requested = step

    def await_request(self, step: int, num_bytes: int) -> None:  # noqa: ARG002
        wait_until(lambda: has_reached(self.requested, step))

    def reply(self, step: int, num_bytes: int) -> None:
        super().reply(step, num_bytes)
        self._replied = step

    def synchronize(self) -> None:
        pass


@pytest.fixture
def channel() -> EagerChannel:
    return EagerChannel()


def rounds_over(
    channel: EagerChannel, *, deadline_s: float = DEADLINE_S, stall_limit_s: float | None = None
) -> DeviceRounds:
    pace = Pace(deadline_s=deadline_s, stall_limit_s=stall_limit_s)
    return DeviceRounds(channel, CODEC, epoch=1, pace=pace, device=CPU, times=RoundTimes())


@pytest.fixture
def target(channel: EagerChannel) -> Iterator[DeviceRounds]:
    rounds = rounds_over(channel)
    yield rounds
    rounds.close()


@pytest.fixture
def draft(channel: EagerChannel) -> Recording:
    """Which serves."""
    hosted = Recording()
    server = DeviceDraft(hosted, channel, CODEC, epoch=1)  # type: ignore[arg-type]
    threading.Thread(target=server.serve, daemon=True).start()
    return hosted


def test_a_round_arrives_as_it_was_sent_and_so_does_its_reply(target: DeviceRounds, draft: Recording) -> None:
    for seed, lengths in enumerate([[4, 1, 2], [1], [5, 4, 4, 3]]):
        round, tables = round_of(lengths, seed=seed)
        drafts = drafts_of(len(lengths))
        target.propose(round, tables, drafts)
        for name, tensor in draft.came[-1].items():
            assert torch.equal(tensor, tensors_of(round)[name]), name
        for own, sent in zip(draft.block_tables, tables, strict=True):
            assert all(torch.equal(table[: len(lengths)], sent) for table in own)
        assert torch.equal(drafts, round.last_sampled[round.idx_mapping] + torch.tensor([10, 11, 12]))
    assert target.times.rounds == 3


@pytest.mark.usefixtures("draft")
def test_drafts_beyond_those_wanted_are_the_last_token(target: DeviceRounds) -> None:
    round, tables = round_of([2, 2], wanted=1)
    drafts = drafts_of(2)
    target.propose(round, tables, drafts)
    assert torch.equal(drafts, round.last_sampled[round.idx_mapping] + torch.tensor([10, 0, 0]))


@pytest.mark.usefixtures("draft")
def test_steps_go_round_the_flags_words(target: DeviceRounds) -> None:
    target._step = (1 << 32) - 3
    target._channel.release(target._step)
    for seed in range(4):
        round, tables = round_of([1, 2], seed=seed)
        drafts = drafts_of(2)
        target.propose(round, tables, drafts)
        assert torch.equal(drafts[:, 0], round.last_sampled[round.idx_mapping, 0] + 10)


def dies(channel: EagerChannel, _: DeviceRounds) -> None:
    channel.lost = PeerDied("ended")


def is_silent(_: EagerChannel, target: DeviceRounds) -> None:
    target.abort()


@pytest.mark.parametrize(("end", "error"), [(dies, PeerDied), (is_silent, ChannelClosed)])
def test_a_stream_that_waits_for_a_draft_that_is_gone_goes_on_without_a_proposal(
    channel: EagerChannel,
    target: DeviceRounds,
    end: Callable[[EagerChannel, DeviceRounds], None],
    error: type[ChannelError],
) -> None:
    """There is no draft; the watchdog is told so while the stream waits."""
    threading.Timer(0.1, end, (channel, target)).start()
    round, tables = round_of([2, 1])
    drafts = drafts_of(2)
    begun = time.monotonic()
    target.propose(round, tables, drafts)
    assert time.monotonic() - begun < 0.1 + 1  # 200 ms where the machine isn't shared
    assert torch.equal(drafts, round.last_sampled[round.idx_mapping].expand(2, K))
    with pytest.raises(error):
        target.propose(round, tables, drafts)


def test_a_round_past_its_deadline_is_the_last(channel: EagerChannel) -> None:
    target = rounds_over(channel, deadline_s=0.1)
    round, tables = round_of([2, 1])
    drafts = drafts_of(2)
    target.propose(round, tables, drafts)
    assert torch.equal(drafts, round.last_sampled[round.idx_mapping].expand(2, K))
    with pytest.raises(DeadlineExceeded, match="no reply to round 1"):
        target.propose(round, tables, drafts)
    target.close()


def test_a_late_reply_does_not_hold_the_stream_up_again(channel: EagerChannel) -> None:
    """A lost draft's stream sets the flag back to a step that is long over; another round's wait is yet to come."""
    target = rounds_over(channel, deadline_s=0.05)
    round, tables = round_of([1])
    target.propose(round, tables, drafts_of(1))
    channel.reply(0, 0)
    channel.await_reply(1)
    target.close()


def test_a_tensor_that_does_not_fit_the_sizes_is_refused_before_anything_is_written(
    channel: EagerChannel, target: DeviceRounds
) -> None:
    round, tables = round_of([2, 1])
    round.seeds = round.seeds[:-1].contiguous()
    with pytest.raises(MessageError, match=r"seeds is torch.int64\[3\], the round sizes make it 32 bytes"):
        target.propose(round, tables, drafts_of(2))
    assert channel.requested == 0


def notice_of_a_round() -> memoryview:
    """The first one of epoch 1."""
    one = np.ones(1, np.int32)
    notice = RoundNotice(
        epoch=1,
        step=1,
        num_tokens=1,
        num_speculative_tokens=K,
        decode_graph_eligible=True,
        query_start_loc=np.array([0, 1], np.int32),
        num_scheduled_tokens=one,
        seq_lens_cpu_upper_bound=one,
    )
    return CODEC.encoder(memoryview(bytearray(max_notice_bytes(SIZES)))).encode(notice)


def test_a_draft_ends_at_a_notice_of_another_epoch(channel: EagerChannel) -> None:
    server = DeviceDraft(Recording(), channel, CODEC, epoch=2)  # type: ignore[arg-type]
    channel.send([notice_of_a_round()], DEADLINE_S)
    assert server.serve() == "a RoundNotice of epoch 1 came in epoch 2"
    assert channel.replied == 0


def test_a_draft_leaves_a_round_that_its_target_has_given_up(channel: EagerChannel) -> None:
    """The notice lay there while the draft's process was stopped; its target's memory may be gone by now."""
    hosted = Recording()
    channel.send([notice_of_a_round()], DEADLINE_S)
    channel._requested, channel.lost = 1, ChannelClosed("the peer closed the channel")
    channel.abort()
    assert DeviceDraft(hosted, channel, CODEC, epoch=1).serve() == "the peer closed the channel"  # type: ignore[arg-type]
    assert not hosted.came
    assert channel.replied == 0


def test_a_draft_ends_at_what_is_no_notice(channel: EagerChannel) -> None:
    channel.send([memoryview(b"nonsense")], DEADLINE_S)
    assert "are no message" in DeviceDraft(Recording(), channel, CODEC, epoch=1).serve()  # type: ignore[arg-type]


def test_a_token_beyond_the_vocabulary_is_none() -> None:
    reply, answered = torch.tensor([[5, 100, -1], [99, 1 << 40, 0]]), torch.tensor([3], dtype=torch.int32)
    drafts = drafts_of(2)
    take_reply(
        drafts,
        last_sampled=torch.tensor([[1], [2]]),
        idx_mapping=torch.tensor([1, 0]),
        reply=reply.data_ptr(),
        answered=answered.data_ptr(),
        step=3,
        wanted=3,
        vocab_size=100,
    )
    assert drafts.tolist() == [[5, 2, 2], [99, 1, 0]]


@pytest.mark.parametrize("num_words", [1, 4095, 4096, 4097, 20_000, 600_001])
def test_a_copy_is_whole_and_no_longer_in_however_many_pieces(num_words: int) -> None:
    copier = Copier(CPU, max_copies=2, num_tables=1)
    source, to = torch.arange(num_words, dtype=torch.int32), torch.full((num_words + 1,), -1, dtype=torch.int32)
    other, word = torch.full((1,), 7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    copier.copy([Copy(to.data_ptr(), source.data_ptr(), 4 * num_words), Copy(word.data_ptr(), other.data_ptr(), 4)])
    assert torch.equal(to[:num_words], source)
    assert to[num_words] == -1
    assert word[0] == 7


def test_a_round_fills_the_buffer_s_start_and_the_largest_all_of_it() -> None:
    layout = DeviceLayout(SIZES)
    names = [tensor.name for tensor in layout.tensors]
    assert {"num_scheduled_tokens", "seq_lens_cpu_upper_bound"}.isdisjoint(names)
    small, largest = layout.of(2, 5), layout.of(SIZES.max_num_reqs, SIZES.max_num_batched_tokens)
    for round in (small, largest):
        assert [section.tensor.name for section in round.sections] == names
        assert max(section.end for section in round.sections) <= round.num_bytes
    assert small.sections[0].num_bytes == 5 * 6 * 2
    assert small.num_bytes < largest.num_bytes == max_request_bytes(SIZES)


@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 31) - 1))
def test_a_flag_has_reached_a_step_until_half_the_circle_later(step: int, later: int) -> None:
    assert has_reached((step + later) % (1 << 32), step)
    assert not has_reached((step + later + (1 << 31)) % (1 << 32), step)


class Hanging(Adding):
    """Takes its time, and hangs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def propose(self, round: Round) -> torch.Tensor:
        time.sleep(self.seconds)
        assert self.goes_on.wait(DEADLINE_S)
        return super().propose(round)


@pytest.fixture
def hanging(channel: EagerChannel) -> Iterator[Hanging]:
    """Which serves."""
    hosted = Hanging()
    server = DeviceDraft(hosted, channel, CODEC, epoch=1)  # type: ignore[arg-type]
    threading.Thread(target=server.serve, daemon=True).start()
    yield hosted
    hosted.goes_on.set()


@pytest.fixture
def paced(channel: EagerChannel) -> Iterator[DeviceRounds]:
    rounds = rounds_over(channel, stall_limit_s=STALL_LIMIT_S)
    yield rounds
    rounds.close()


def proposed(target: DeviceRounds, *, wanted: int = K) -> tuple[bool, float | None]:
    """Whether the draft's tokens came, and what it was waited for."""
    round, tables = round_of([2, 1], wanted=wanted)
    drafts, last = drafts_of(2), round.last_sampled[round.idx_mapping]
    waited_s = target.propose(round, tables, drafts)
    if torch.equal(drafts, last.expand(2, K)):
        return False, waited_s
    assert torch.equal(drafts[:, :wanted], (last + torch.arange(10, 10 + K))[:, :wanted])
    return True, waited_s


def test_a_draft_that_hangs_is_let_go_by_the_pace_of_its_rounds(paced: DeviceRounds, hanging: Hanging) -> None:
    for _ in range(PACED):
        assert proposed(paced)[0]
    hanging.goes_on.clear()
    begun = time.monotonic()
    assert not proposed(paced)[0]
    assert STALL_LIMIT_S <= time.monotonic() - begun < DEADLINE_S / 2  # 50 ms more where the machine isn't shared
    with pytest.raises(DeadlineExceeded, match=f"no reply to round {PACED + 1}"):
        proposed(paced)


def test_a_draft_that_is_slow_and_steady_is_kept(paced: DeviceRounds, hanging: Hanging) -> None:
    hanging.seconds = 1.5 * STALL_LIMIT_S
    assert all(proposed(paced)[0] for _ in range(PACED + 2))


def test_rounds_that_may_run_other_kernels_have_the_deadline_first(paced: DeviceRounds, hanging: Hanging) -> None:
    assert all(proposed(paced)[0] for _ in range(PACED))
    hanging.seconds = 1.5 * STALL_LIMIT_S
    assert proposed(paced, wanted=1)[0], "a draft that drafts fewer compiles first"


def test_a_draft_that_comes_anew_compiles_as_the_first_one_did(channel: EagerChannel, hanging: Hanging) -> None:
    pace = Pace(deadline_s=DEADLINE_S, stall_limit_s=STALL_LIMIT_S)
    kind = _kind_of(round_of([2, 1])[0])
    for num_tokens in (3, 3, 3, 3):
        pace.took(num_tokens, 0.01, kind)
    assert pace.allowed_s(3, kind) < 1.5 * STALL_LIMIT_S
    target = target_rounds(channel, CODEC, epoch=1, pace=pace, device=CPU, times=RoundTimes())
    assert isinstance(target, DeviceRounds)
    hanging.seconds = 1.5 * STALL_LIMIT_S
    assert proposed(target)[0]
    target.close()


def test_what_the_target_does_between_two_rounds_is_not_the_draft_s(paced: DeviceRounds, hanging: Hanging) -> None:
    """A long prompt, a batch: the next round has begun on the CPU, and its request isn't sent."""
    assert all(proposed(paced)[0] for _ in range(PACED))
    assert hanging.goes_on.is_set()
    ask = paced._ask

    def late(*arguments: Any) -> None:
        time.sleep(2 * STALL_LIMIT_S)
        ask(*arguments)

    paced._ask = late  # type: ignore[method-assign]
    assert all(proposed(paced)[0] for _ in range(2))


def test_what_the_stream_waited_is_known_when_it_has_passed(paced: DeviceRounds, hanging: Hanging) -> None:
    hanging.seconds = 0.02
    waits = [proposed(paced)[1] for _ in range(PACED + 2)]
    assert waits[: PACED - 1] == [None] * (PACED - 1), "the first ones compile"
    assert all(wait is not None and wait >= 0.02 for wait in waits[PACED:])
    assert paced.times.wait >= 0.02 * (PACED + 1)
    assert paced.times.round_trip == paced.times.transfer == 0


def test_a_wait_that_ended_without_a_reply_is_no_pace(paced: DeviceRounds, hanging: Hanging) -> None:
    assert all(proposed(paced)[0] for _ in range(PACED))
    hanging.goes_on.clear()
    assert not proposed(paced)[0]
    before_s = paced.times.wait
    with pytest.raises(DeadlineExceeded):
        proposed(paced)
    assert paced.times.wait - before_s >= STALL_LIMIT_S
    latest_s = [size.seconds[-1] for size in paced._pace._sizes.values()]
    assert max(latest_s) < STALL_LIMIT_S


def test_a_target_does_not_wait_for_room_for_a_notice_to_a_draft_that_hangs(channel: EagerChannel) -> None:
    """The CPU is rounds ahead of the stream that waits, and the ring to the draft is full."""
    target = rounds_over(channel, deadline_s=0.2)
    target._channel.await_reply = lambda _: None  # type: ignore[method-assign]  # the stream does, the CPU doesn't
    assert not proposed(target)[0]
    ended = threading.Event()

    def wait_for_room(*_: Any) -> int:
        assert ended.wait(DEADLINE_S), "the target's CPU waits for ever"
        raise ChannelClosed("this side closed the channel")

    channel.send = wait_for_room  # type: ignore[method-assign]
    channel.abort = ended.set  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="no reply to round 1"):
        proposed(target)
    target.close()


def test_rounds_that_are_closed_may_be_aborted(channel: EagerChannel, target: DeviceRounds) -> None:
    """By whoever hears of the draft's silence. What the flags lie in is gone then."""
    target.close()

    def gone(*_: Any) -> None:
        raise ValueError("operation forbidden on released memoryview object")

    channel.release = gone  # type: ignore[method-assign]
    target.abort()


def look(watch: RoundWatch, times: Iterable[float], *, requested: int, replied: int = 0) -> None:
    for now_s in times:
        watch.look(requested=requested, replied=replied, now_s=now_s, gone=None)


def turns(from_s: float, to_s: float) -> list[float]:
    return [from_s + turn * WATCH_INTERVAL_S for turn in range(round((to_s - from_s) / WATCH_INTERVAL_S) + 1)]


def test_a_watch_s_clock_begins_where_the_stream_waits() -> None:
    watch = RoundWatch()
    watch.begin(1, limit_s=1.0)
    watch.begin(2, limit_s=1.0)
    look(watch, turns(0.0, 5.0), requested=0)
    look(watch, turns(5.0, 5.9), requested=1)
    look(watch, turns(5.9, 9.0), requested=1, replied=1)  # the target's own step
    look(watch, turns(9.0, 9.9), requested=2, replied=1)
    assert watch.lost is None
    look(watch, turns(9.9, 10.1), requested=2, replied=1)
    assert isinstance(watch.lost, DeadlineExceeded)
    assert watch.newest == 2
    with pytest.raises(DeadlineExceeded):
        watch.begin(3, limit_s=1.0)


def test_the_first_of_several_rounds_is_the_one_that_is_overdue() -> None:
    """The others are let go with it, and have taken no time."""
    watch = RoundWatch()
    watch.begin(1, limit_s=0.5)
    watch.begin(2, limit_s=0.1)
    look(watch, turns(0.0, 0.4), requested=1)
    assert watch.lost is None
    look(watch, turns(0.4, 0.6), requested=1)
    assert "round 1" in str(watch.lost)


def test_a_watch_that_stood_still_blames_no_draft() -> None:
    watch = RoundWatch()
    watch.begin(1, limit_s=0.2)
    look(watch, [*turns(0.0, 0.1), 3.0, 3.01, 7.0], requested=1)
    assert watch.lost is None
    look(watch, turns(7.0, 7.1), requested=1)
    assert isinstance(watch.lost, DeadlineExceeded)


def test_a_watch_that_is_always_late_finds_a_draft_that_hangs() -> None:
    watch = RoundWatch()
    watch.begin(1, limit_s=0.2)
    look(watch, [0.1 * turn for turn in range(15)], requested=1)
    assert isinstance(watch.lost, DeadlineExceeded)


def test_the_first_reason_of_a_loss_counts() -> None:
    watch = RoundWatch()
    watch.lose(PeerDied("first"))
    watch.look(requested=0, replied=0, now_s=0.0, gone=ChannelClosed("second"))
    assert isinstance(watch.lost, PeerDied)


def test_waits_are_told_in_order_once_the_stream_has_passed_them() -> None:
    made: list[Any] = []

    class Event(CpuEvent):
        is_passed = False

        def __init__(self) -> None:
            made.append(self)

        def query(self) -> bool:
            return self.is_passed

    waits = StreamWaits(Event)
    for num_tokens in (5, 6):
        waits.begin(num_tokens, "kind")
        waits.end()
    made[3].is_passed = True
    assert list(waits.passed()) == []
    made[1].is_passed = True
    assert [(wait.num_tokens, wait.kind) for wait in waits.passed()] == [(5, "kind"), (6, "kind")]
    waits.begin(7, "kind")
    assert len(made) == 4, "events are used again"
