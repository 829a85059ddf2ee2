"""The channels between GPUs without one: a driver that only counts stands for CUDA's, and what is held is looked at."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes import addressof, create_string_buffer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.channel import ChannelAddress, ChannelUnavailable, check_channel, cuda_driver, cuda_ipc, nccl
from cluster.channel.cuda_ipc import CudaIpcChannel, CudaIpcOffer
from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import DIRECTORY, segments_of
from cluster.channel.shm import ShmOffer
from cluster.speculation.rank_gate import RankGate

DEADLINE_S = 60.0

_DRAFT = """
import math, sys, time
from cluster.channel import ChannelAddress, ChannelError, open_channel
channel = open_channel(ChannelAddress.from_json(sys.argv[1]), time.monotonic() + 60)
print("open", flush=True)
try:
    channel.recv(memoryview(bytearray(64)), math.inf)
except ChannelError:
    time.sleep(0.3)
"""
"""A draft's process as far as its target sees it: it ends a while after its channel."""


class Driver:
    """Has the driver's names. A call answers with its status and results; `fails` names one that doesn't succeed, after
    `successes` that do."""

    def __init__(self) -> None:
        self.allocated: dict[int, int] = {}
        self.registered: set[int] = set()
        self.opened: set[int] = set()
        self.fails: str | None = None
        self.successes = 0
        self.calls: Counter[str] = Counter()
        self.on_free: Callable[[], None] = lambda: None
        self.named_before = named()

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        call = getattr(type(self), f"_{name}", None)

        def called(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if name == self.fails and self.calls[name] > self.successes:
                return 2, None
            return 0, *(() if call is None else call(self, *arguments))

        return called

    class CUipcMemHandle:
        def __init__(self) -> None:
            self._bytes = create_string_buffer(cuda_driver.IPC_HANDLE_BYTES)

        def getPtr(self) -> int:  # noqa: N802 - the binding's
            return addressof(self._bytes)

    def _cuMemAlloc(self, num_bytes: int) -> tuple[int]:  # noqa: N802
        address = 1 << 20 | len(self.allocated) << 12
        self.allocated[address] = num_bytes
        return (address,)

    def _cuMemFree(self, address: int) -> tuple[()]:  # noqa: N802
        self.on_free()
        del self.allocated[address]
        return ()

    def _cuIpcGetMemHandle(self, _: int) -> tuple[Any]:  # noqa: N802
        return (self.CUipcMemHandle(),)

    def _cuIpcOpenMemHandle(self, *_: Any) -> tuple[int]:  # noqa: N802
        self.opened.add(1 << 30)
        return (1 << 30,)

    def _cuIpcCloseMemHandle(self, address: int) -> tuple[()]:  # noqa: N802
        self.opened.remove(address)
        return ()

    def _cuMemHostRegister(self, address: int, *_: int) -> tuple[()]:  # noqa: N802
        self.registered.add(address)
        return ()

    def _cuMemHostGetDevicePointer(self, address: int, _: int) -> tuple[int]:  # noqa: N802
        return (address,)

    def _cuMemHostUnregister(self, address: int) -> tuple[()]:  # noqa: N802
        self.registered.remove(address)
        return ()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_ipc, "current_gpu", lambda *_, **__: 0)
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda _: "GPU-0")
    return driver


Accept = Callable[[], tuple[CudaIpcChannel, subprocess.Popen[str]]]


@pytest.fixture
def accept() -> Iterator[Accept]:
    """The target's end of a channel, and its draft's process."""
    drafts: list[subprocess.Popen[str]] = []

    def accept_one() -> tuple[CudaIpcChannel, subprocess.Popen[str]]:
        offer = cuda_ipc_offer()
        ring = json.dumps(json.loads(offer.address.location)["ring"])
        drafts.append(subprocess.Popen([sys.executable, "-c", _DRAFT, ring], stdout=subprocess.PIPE, text=True))
        channel = offer.accept(time.monotonic() + DEADLINE_S)
        assert drafts[-1].stdout is not None
        assert drafts[-1].stdout.readline() == "open\n"
        return channel, drafts[-1]

    yield accept_one
    for draft in drafts:
        draft.kill()
        draft.communicate()


def cuda_ipc_offer() -> CudaIpcOffer:
    return CudaIpcOffer(max_send_bytes=1000, max_receive_bytes=64, max_notice_bytes=64, num_slots=2)


def test_a_target_frees_its_memory_when_its_drafts_process_has_ended(driver: Driver, accept: Accept) -> None:
    channel, draft = accept()
    process, lived = ProcessIdentity.of(draft.pid), []
    driver.on_free = lambda: lived.append(process.exists())
    assert list(driver.allocated.values()) == [1024 + 64]
    channel.close()
    assert lived == [False]
    assert not driver.allocated
    assert not driver.registered


def test_memory_that_a_draft_may_still_write_to_stays(
    driver: Driver, accept: Accept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process was stopped with a round before it, and goes on some time."""
    monkeypatch.setattr(cuda_ipc, "DRAFT_END_TIMEOUT_S", 0.2)
    channel, draft = accept()
    draft.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        channel.close()
    assert 0.2 <= time.monotonic() - begun < DEADLINE_S
    assert list(driver.allocated.values()) == [1024 + 64]
    assert "the 1088 bytes of its rounds stay until this process ends" in caplog.text
    draft.send_signal(signal.SIGCONT)
    assert draft.wait(DEADLINE_S) == 0, "it learns that the channel is closed"
    channel.close()
    channel.release(7)  # from a thread that doesn't know yet


def named() -> list[Path]:
    """What this process has in /dev/shm."""
    return segments_of([ProcessIdentity.current()])


def require_nothing_held(driver: Driver) -> None:
    assert not driver.allocated
    assert not driver.registered
    assert not driver.opened
    assert named() == driver.named_before


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemHostGetDevicePointer", "cuMemAlloc", "cuIpcGetMemHandle"])
def test_an_offer_that_fails_leaves_nothing(driver: Driver, call: str) -> None:
    """It is made again every few seconds."""
    driver.fails = call
    with pytest.raises(ChannelUnavailable, match=f"the cuda_ipc channel: {call}"):
        cuda_ipc_offer()
    require_nothing_held(driver)


def test_an_offer_without_the_driver_s_bindings_leaves_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ChannelUnavailable("a channel between GPUs", "cuda.bindings isn't there", "install them")

    monkeypatch.setattr(cuda_driver, "_driver", missing)
    with pytest.raises(ChannelUnavailable, match="bindings isn't there"):
        cuda_ipc_offer()
    require_nothing_held(driver)


def test_an_offer_without_room_for_its_ring_leaves_nothing(driver: Driver) -> None:
    status = os.statvfs(DIRECTORY)
    with pytest.raises(ChannelUnavailable, match="--shm-size"):
        CudaIpcOffer(
            max_send_bytes=64, max_receive_bytes=64, max_notice_bytes=status.f_bavail * status.f_frsize, num_slots=2
        )
    require_nothing_held(driver)


def test_a_withdrawn_offer_leaves_nothing_at_either_side(driver: Driver) -> None:
    offer = cuda_ipc_offer()
    offer._ring.withdraw()  # when the draft has opened the rest
    with pytest.raises(ChannelUnavailable):
        CudaIpcChannel.open(offer.address)
    assert not driver.opened
    offer.withdraw()
    offer.withdraw()
    require_nothing_held(driver)


def test_nccl_buffers_of_which_one_has_no_room_leave_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.fails, driver.successes = "cuMemAlloc", 1
    ended: list[str] = []
    group = SimpleNamespace(abort=lambda: ended.append("group"))
    beside: Any = SimpleNamespace(max_send_bytes=64, max_receive_bytes=64, close=lambda: ended.append("beside"))
    monkeypatch.setattr(nccl, "NcclGroup", lambda *_: group)
    address = ChannelAddress(
        kind="nccl", location="", num_slots=2, max_bytes_from_offerer=1000, max_bytes_from_opener=64
    )
    with pytest.raises(ChannelUnavailable, match="the nccl channel: cuMemAlloc"), nccl._closing(beside):
        nccl._joined(beside, b"", 0, address, 0.0)
    assert ended == ["group", "beside"]
    require_nothing_held(driver)


def test_a_gate_that_is_closed_leaves_nothing(driver: Driver) -> None:
    first = RankGate.first()
    further = RankGate.further(first.name)
    first.unlink()
    for gate in (first, further):
        gate.close()
    require_nothing_held(driver)


@pytest.mark.parametrize("part", ["ring", "flags"])
def test_a_draft_without_the_targets_dev_shm_says_so_before_it_opens_the_channel(driver: Driver, part: str) -> None:
    offer = cuda_ipc_offer()
    check_channel(offer.address)
    (DIRECTORY / {"ring": offer._ring.address.location, "flags": offer._flags.segment.name}[part]).unlink()
    with pytest.raises(ChannelUnavailable, match=f"run both sides as one user with one {DIRECTORY}"):
        check_channel(offer.address)
    offer.withdraw()
    require_nothing_held(driver)


def test_what_goes_beside_nccl_on_one_host_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "current_gpu", lambda *_, **__: 0)
    monkeypatch.setattr(nccl, "uuid_of", lambda _: "GPU-0")
    monkeypatch.setattr(nccl.nccl_library, "require", lambda: None)
    ring = ShmOffer(max_send_bytes=64, max_receive_bytes=1, num_slots=2)
    location = json.dumps({"gpu": "GPU-1", "beside": json.loads(ring.address.to_json())})
    address = ChannelAddress(
        kind="nccl", location=location, num_slots=2, max_bytes_from_offerer=64, max_bytes_from_opener=64
    )
    check_channel(address)
    ring.withdraw()
    with pytest.raises(ChannelUnavailable, match="or use the gloo channel"):
        check_channel(address)
