"""What every channel promises, asked of each kind: some of it within this process, some of it of two."""

import contextlib
import json
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from cluster.channel import (
    Channel,
    ChannelAddress,
    ChannelClosed,
    ChannelError,
    ChannelKind,
    ChannelOffer,
    ChannelUnavailable,
    DeadlineExceeded,
    PeerDied,
    offer_channel,
    open_channel,
)
from cluster.contract.errors import DocumentError

KINDS: tuple[ChannelKind, ...] = ("shm", "gloo")
MAX_BYTES = 1 << 20

Pair = tuple[Channel, Channel]


class Peer:
    """The other process, and what it reports. One that has done its part plays the next: starting torch is slow."""

    _spare: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, role: str, address: ChannelAddress | None = None, *, fresh: bool = False) -> None:
        command = [sys.executable, "-m", "tests.split.channel_peer"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        spare = [] if fresh else self._spare
        self._process = spare.pop() if spare else subprocess.Popen(command, text=True, **pipes)
        order = {"role": role, "address": None if address is None else address.to_json()}
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def read(self) -> dict[str, object]:
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the peer ended early: {self._process.communicate()[1]}")
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def release(self) -> None:
        """Its part is over; another test may have the process."""
        assert self.read() == {"done": True}
        self._spare.append(self._process)

    def end(self) -> str:
        """Its part is over, and so is the process; returns what that wrote to stderr."""
        assert self.read() == {"done": True}
        errors = self._process.communicate(timeout=30)[1]
        assert self._process.returncode == 0, errors
        return errors

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process not in self._spare:
            self._process.kill()
            self._process.communicate()


def within(seconds: float = 20) -> float:
    return time.monotonic() + seconds


def offered(kind: ChannelKind, **options: int) -> ChannelOffer:
    return offer_channel(kind, **{"max_send_bytes": MAX_BYTES, "max_receive_bytes": MAX_BYTES, **options})


@contextlib.contextmanager
def pair_of(kind: ChannelKind, **options: int) -> Iterator[Pair]:
    """Both ends in this process."""
    offer = offered(kind, **options)
    opened: list[Channel] = []
    opener = threading.Thread(target=lambda: opened.append(open_channel(offer.address, within())))
    opener.start()
    with offer.accept(within()) as one:
        opener.join()
        with opened[0] as other:
            yield one, other


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> ChannelKind:
    return request.param


@pytest.fixture
def pair(kind: ChannelKind) -> Iterator[Pair]:
    with pair_of(kind) as both:
        yield both


@pytest.fixture
def buffer() -> memoryview:
    return memoryview(bytearray(MAX_BYTES))


def outcome_of(call: Callable[[], object]) -> tuple[threading.Thread, list[ChannelError]]:
    """Run a call that is meant to fail in a thread."""
    errors: list[ChannelError] = []

    def run() -> None:
        try:
            call()
        except ChannelError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_two_processes_exchange_messages_of_every_size(kind: ChannelKind, buffer: memoryview) -> None:
    source = random.Random(0)
    sizes = [1, 2, 63, 64, 65, 4095, 4096, MAX_BYTES - 1, MAX_BYTES] + [source.randint(1, 100_000) for _ in range(40)]
    offer = offered(kind)
    with Peer("echo", offer.address) as peer:
        with offer.accept(within(60)) as channel:
            peer.read()
            for size in sizes:
                sent = source.randbytes(size)
                cut = source.randint(0, size)
                parts = [memoryview(sent)[:cut], memoryview(sent)[cut:]]
                assert channel.send(parts, within()) == size
                assert channel.recv(buffer, within()) == size
                assert buffer[:size] == sent
        assert peer.read()["error"] == "ChannelClosed"
        peer.release()


def test_a_waiting_side_uses_no_cpu(kind: ChannelKind) -> None:
    offer = offered(kind)
    with Peer("idle", offer.address) as peer, offer.accept(within(60)) as channel:
        peer.read()
        with pytest.raises(DeadlineExceeded):
            channel.recv(memoryview(bytearray(1)), within(1))  # it waits for as long as we do
        channel.send([memoryview(b"!")], within())
        report = peer.read()
        assert report["waited_s"] > 0.9
        assert report["cpu_s"] < 0.05 * report["waited_s"]
        peer.release()


def test_messages_of_a_peer_that_closed_are_received_before_its_end(kind: ChannelKind, buffer: memoryview) -> None:
    offer = offered(kind, num_slots=4)
    with Peer("leave", offer.address) as peer, offer.accept(within(60)) as channel:
        assert peer.read() == {"ready": True}
        assert peer.end() == ""
        for number in range(3):
            assert channel.recv(buffer, within()) == 1
            assert buffer[0] == number
        with pytest.raises(ChannelError):
            channel.recv(buffer, within())


def test_a_killed_peer_is_noticed_by_whoever_waits_for_a_message_or_for_room(
    kind: ChannelKind, buffer: memoryview
) -> None:
    offer = offered(kind)
    with Peer("still", offer.address) as peer, offer.accept(within(60)) as channel:
        peer.read()
        fill(channel)
        waits = [
            outcome_of(lambda: channel.recv(buffer, math.inf)),
            outcome_of(lambda: channel.send([memoryview(b"?")], math.inf)),
        ]
        killed = time.monotonic()
        peer.kill()
        for thread, errors in waits:
            thread.join(20)
            assert isinstance(errors[0], PeerDied)
        assert time.monotonic() - killed < 1  # 200 ms where the machine isn't shared
        with pytest.raises(PeerDied):
            channel.send([memoryview(b"?")], within())


def fill(channel: Channel) -> int:
    """Send until the channel has no more room; returns how many messages went."""
    sent = 0
    with contextlib.suppress(DeadlineExceeded):
        while True:
            channel.send([memoryview(sent.to_bytes(4, "little"))], within(0.3))
            sent += 1
    return sent


def test_a_sender_waits_for_room_and_loses_nothing(pair: Pair, buffer: memoryview) -> None:
    one, other = pair
    sent = fill(one)
    assert sent >= 2
    assert other.recv(buffer, within()) == 4
    one.send([memoryview(sent.to_bytes(4, "little"))], within())
    for number in range(1, sent + 1):
        assert other.recv(buffer, within()) == 4
        assert int.from_bytes(buffer[:4], "little") == number


def test_a_passed_deadline_leaves_the_channel_as_it_was(pair: Pair, buffer: memoryview) -> None:
    one, other = pair
    for deadline in (within(0.05), within(-1), -math.inf):
        with pytest.raises(DeadlineExceeded):
            other.recv(buffer, deadline)
    one.send([memoryview(b"late")], within())
    assert other.recv(buffer, within()) == 4
    assert buffer[:4] == b"late"


def test_messages_keep_their_order_when_both_sides_hurry(pair: Pair) -> None:
    one, other = pair
    count = 200

    def send_all() -> None:
        for number in range(count):
            one.send([memoryview(number.to_bytes(4, "little")), memoryview(bytes(number % 50))], within())

    sender = threading.Thread(target=send_all)
    sender.start()
    buffer = memoryview(bytearray(64))
    for number in range(count):
        assert other.recv(buffer, within()) == 4 + number % 50
        assert int.from_bytes(buffer[:4], "little") == number
    sender.join()


def test_abort_ends_a_wait_of_another_thread_on_both_sides(pair: Pair) -> None:
    one, other = pair
    waits = [
        outcome_of(lambda: one.recv(memoryview(bytearray(1)), math.inf)),
        outcome_of(lambda: other.recv(memoryview(bytearray(1)), math.inf)),
    ]
    one.abort()
    for thread, _ in waits:
        thread.join(20)
    assert isinstance(waits[0][1][0], ChannelClosed)
    assert isinstance(waits[1][1][0], ChannelClosed | PeerDied)
    for channel in pair:
        with pytest.raises((ChannelClosed, PeerDied)):
            channel.send([memoryview(b"?")], within())


def test_a_message_that_does_not_fit_is_refused_before_it_is_sent(kind: ChannelKind) -> None:
    with pair_of(kind, max_send_bytes=8, max_receive_bytes=9) as (one, other):
        assert (one.max_send_bytes, other.max_send_bytes) == (8, 9)
        assert (one.max_receive_bytes, other.max_receive_bytes) == (9, 8)
        for size in (0, 9):
            with pytest.raises(ValueError, match=f"a message of {size} bytes: this channel sends 1 to 8"):
                one.send([memoryview(bytes(size))], within())
        with pytest.raises(DeadlineExceeded):
            other.recv(memoryview(bytearray(8)), within(0.05))


def test_a_message_stays_when_the_buffer_for_it_is_too_short(pair: Pair, buffer: memoryview) -> None:
    one, other = pair
    one.send([memoryview(b"12345")], within())
    with pytest.raises(ValueError, match="the message has 5 bytes, the buffer to receive it 4"):
        other.recv(buffer[:4], within())
    assert other.recv(buffer, within()) == 5


def test_an_offer_that_nobody_takes_ends_at_its_deadline(kind: ChannelKind) -> None:
    offer = offered(kind)
    with pytest.raises(DeadlineExceeded):
        offer.accept(within(0.2))
    with pytest.raises((ChannelUnavailable, DeadlineExceeded)):
        open_channel(offer.address, within(0.5))


def test_an_address_survives_json_and_foreign_ones_are_refused() -> None:
    address = ChannelAddress(
        kind="gloo", location="h:1/x", num_slots=2, max_bytes_from_offerer=3, max_bytes_from_opener=4
    )
    assert ChannelAddress.from_json(address.to_json()) == address
    with pytest.raises(DocumentError, match="num_slots is 0"):
        ChannelAddress.from_json(address.to_json().replace('"num_slots": 2', '"num_slots": 0'))
    for location in ("", "../x", "h:1/x", "h:99999999/0123456789abcdef"):
        for kind in KINDS:
            foreign = ChannelAddress(
                kind=kind, location=location, num_slots=2, max_bytes_from_offerer=3, max_bytes_from_opener=4
            )
            with pytest.raises(ChannelUnavailable):
                open_channel(foreign, within(1))
