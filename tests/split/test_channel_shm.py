"""Shared memory: what is left of it, who may have it, and what a ring makes of a peer that writes nonsense."""

import math
import os
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.channel import (
    ChannelAddress,
    ChannelCorrupted,
    ChannelUnavailable,
    DeadlineExceeded,
    PeerDied,
    check_channel,
    futex,
    offer_channel,
    open_channel,
)
from cluster.channel import segment as segments
from cluster.channel.process import ProcessIdentity, ProcessWatch, pid_namespace
from cluster.channel.ring import RingReader, RingWriter, ring_bytes
from cluster.channel.segment import DIRECTORY, SharedSegment, remove_orphans, unlink
from tests.split.test_channel import Peer, offered, pair_of, within


def is_left(address: ChannelAddress) -> bool:
    return (DIRECTORY / address.location).exists()


def test_nothing_is_left_in_dev_shm_while_and_after_a_channel_is_open() -> None:
    offer = offered("shm")
    assert is_left(offer.address)
    with Peer("echo", offer.address) as peer, offer.accept(within(60)):
        assert not is_left(offer.address)
        assert peer.read() == {"ready": True}
    assert not is_left(offer.address)


def test_nothing_is_left_after_a_withdrawn_offer() -> None:
    offer = offered("shm")
    offer.withdraw()
    offer.withdraw()
    assert not is_left(offer.address)


def test_nothing_is_left_after_the_opener_was_killed_and_the_offerer_closed() -> None:
    offer = offered("shm")
    with Peer("still", offer.address) as peer, offer.accept(within(60)) as channel:
        peer.read()
        peer.kill()
        with pytest.raises(PeerDied):
            channel.recv(memoryview(bytearray(64)), within())
    assert not is_left(offer.address)


def test_nothing_is_left_after_the_offerer_was_killed_and_the_opener_closed() -> None:
    with Peer("offer") as peer:
        address = ChannelAddress.from_json(str(peer.read()["address"]))
        with open_channel(address, within()) as channel:
            peer.read()
            peer.kill()
            with pytest.raises(PeerDied):
                channel.recv(memoryview(bytearray(64)), within())
    assert not is_left(address)


def test_the_offer_of_a_killed_process_is_cleared_away_by_the_next_one() -> None:
    with Peer("offer") as peer:
        address = ChannelAddress.from_json(str(peer.read()["address"]))
    assert is_left(address)
    with pytest.raises(ChannelUnavailable, match="the process that offered it has ended"):
        open_channel(address, within())
    offered("shm").withdraw()
    assert not is_left(address)


def test_orphans_of_living_processes_and_foreign_files_stay() -> None:
    offer = offered("shm")
    remove_orphans()
    assert is_left(offer.address)
    offer.withdraw()


def test_the_peer_needs_no_torch_and_leaves_no_warning() -> None:
    offer = offered("shm")
    with Peer("echo", offer.address, fresh=True) as peer:
        with offer.accept(within(60)):
            peer.read()
        assert peer.read() == {"error": "ChannelClosed", "torch": False}
        assert peer.end() == ""


def test_an_offer_is_for_one_opener() -> None:
    offer = offered("shm")
    with open_channel(offer.address, within()), pytest.raises(ChannelUnavailable):
        open_channel(offer.address, within())
    offer.accept(within()).close()


@pytest.mark.parametrize("change", [{"num_slots": 3}, {"max_bytes_from_offerer": 5}, {"max_bytes_from_opener": 2**40}])
def test_an_address_that_differs_from_its_segment_is_refused(change: dict[str, int]) -> None:
    offer = offered("shm")
    with pytest.raises(ChannelUnavailable, match="its memory isn't laid out as its address says"):
        open_channel(replace(offer.address, **change), within())
    offer.withdraw()


def test_an_offer_that_can_be_opened_passes_and_is_left_to_be_opened() -> None:
    offer = offered("shm")
    check_channel(offer.address)
    with open_channel(offer.address, within()):
        offer.accept(within()).close()


def test_an_offer_of_another_pid_namespace_is_refused_before_it_is_opened() -> None:
    offer = offered("shm")
    elsewhere = offer.address.location.replace(f".{pid_namespace()}.", ".1.")
    with pytest.raises(ChannelUnavailable, match="share the PID namespace between the two containers"):
        check_channel(replace(offer.address, location=elsewhere))
    offer.withdraw()


def test_an_offer_in_another_dev_shm_is_refused_before_it_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of two containers that share their processes alone."""
    offer = offered("shm")
    with monkeypatch.context() as here:
        here.setattr(segments, "DIRECTORY", tmp_path)
        with pytest.raises(ChannelUnavailable, match=rf"process {os.getpid()} has made it, .*\(No such file or direc"):
            check_channel(offer.address)
    offer.withdraw()


def test_an_offer_of_another_user_is_refused_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """By root, too, who could open it."""
    offer, user = offered("shm"), os.geteuid()
    with monkeypatch.context() as here:
        here.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(ChannelUnavailable, match=f"it belongs to user {user}, .* run both sides as one user"):
            check_channel(offer.address)
    offer.withdraw()


def test_an_offer_of_a_process_that_has_ended_is_no_reason_to_refuse() -> None:
    with Peer("offer") as peer:
        address = ChannelAddress.from_json(str(peer.read()["address"]))
    unlink(address.location)
    check_channel(address)


def test_a_channel_larger_than_dev_shm_is_refused_with_the_remedy() -> None:
    free = os.statvfs(DIRECTORY).f_bavail * os.statvfs(DIRECTORY).f_frsize
    with pytest.raises(ChannelUnavailable, match="--shm-size"):
        offer_channel("shm", max_send_bytes=free, max_receive_bytes=free)


def test_a_process_that_has_ended_can_not_be_watched() -> None:
    with Peer("offer") as peer:
        peer.read()
        identity = ProcessIdentity.of(peer.pid)
        watch = ProcessWatch(identity)
        assert not watch.has_ended()
        with pytest.raises(ProcessLookupError):
            ProcessWatch(replace(identity, start_ticks=identity.start_ticks + 1))
    assert watch.has_ended()
    assert not identity.exists()
    watch.close()


def is_asleep(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_bytes()
    return stat[stat.rindex(b")") + 2 :].startswith(b"S")


class RingPair:
    """Both ends of one ring of four slots of 100 bytes."""

    def __init__(self, num_slots: int = 4) -> None:
        self.segment = SharedSegment.create(ring_bytes(num_slots, 100))
        unlink(self.segment.name)
        self.writer = RingWriter(self.segment, 0, num_slots, 100)
        self.reader = RingReader(self.segment, 0, num_slots, 100)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=100)), max_size=100), st.integers(1, 5))
def test_a_ring_is_a_queue_of_its_slots(operations: list[bytes | None], num_slots: int) -> None:
    ring = RingPair(num_slots)
    model: deque[bytes] = deque()
    buffer = memoryview(bytearray(100))
    for message in operations:
        assert ring.writer.is_ready() == (len(model) < num_slots)
        assert ring.reader.is_ready() == bool(model)
        if message is None and model:
            assert bytes(buffer[: ring.reader.read(buffer)]) == model.popleft()
        elif message is not None and len(model) < num_slots:
            ring.writer.write([memoryview(message)], len(message))
            model.append(message)
    ring.segment.close()


def test_a_ring_goes_on_when_its_counters_run_over() -> None:
    ring = RingPair(num_slots=3)
    for end in (ring.writer, ring.reader):
        end._count = 2**32 - 2
    ring.segment.words[0] = ring.segment.words[16] = 2**32 - 2
    buffer = memoryview(bytearray(100))
    for number in range(6):
        ring.writer.write([memoryview(bytes([number] * 5))], 5)
        assert ring.reader.read(buffer) == 5
        assert buffer[0] == number
    ring.segment.close()


def test_a_ring_that_was_overwritten_is_told_from_one_that_works() -> None:
    ring = RingPair()
    ring.writer.write([memoryview(b"x")], 1)
    ring.segment.words[128 // 4] = 101  # the length of the first message
    with pytest.raises(ChannelCorrupted, match="a message of 101 bytes"):
        ring.reader.read(memoryview(bytearray(200)))
    ring.segment.words[0] = 77
    with pytest.raises(ChannelCorrupted, match="77 messages are on their way"):
        ring.reader.is_ready()
    ring.segment.close()


def test_a_sleeping_reader_is_woken_by_the_message_not_by_its_next_look() -> None:
    with pair_of("shm") as (one, other):
        buffer = memoryview(bytearray(1))
        latencies = []
        for _ in range(20):
            received: list[float] = []

            def receive(received: list[float] = received) -> None:
                other.recv(buffer, math.inf)
                received.append(time.monotonic())

            reader = threading.Thread(target=receive)
            reader.start()
            while not is_asleep(reader):
                time.sleep(0)
            sent = time.monotonic()
            one.send([memoryview(b"!")], within())
            reader.join()
            latencies.append(received[0] - sent)
        assert sorted(latencies)[10] < 0.025  # half of the interval at which a waiting side looks unasked


def test_without_a_futex_a_side_naps_and_still_gets_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_HAS_FUTEX", False)
    with pair_of("shm") as (one, other):
        buffer = memoryview(bytearray(8))
        with pytest.raises(DeadlineExceeded):
            other.recv(buffer, within(0.01))
        one.send([memoryview(b"!")], within())
        assert other.recv(buffer, within()) == 1


def test_a_machine_without_ordered_stores_needs_the_futex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_IS_X86", False)
    offered("shm").withdraw()
    futex.fence()
    monkeypatch.setattr(futex, "_HAS_FUTEX", False)
    with pytest.raises(ChannelUnavailable, match="use the gloo channel"):
        offered("shm")
