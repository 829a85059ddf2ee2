"""Coordinator and members over real gRPC, on one Unix socket; the silent member is a process of its own."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from dspark.v1.control_pb2 import ChannelAddress, EngineSizes, RoundOptions

from cluster.contract.errors import ContractError, ContractViolation, Writer
from cluster.contract.facts import Role
from cluster.contract.policy import Policy
from cluster.control.child_process import ChildProcess
from cluster.control.member import Member
from cluster.control.options import MAX_MESSAGE_BYTES
from cluster.control.refusals import ControlError
from cluster.control.service import serving
from cluster.control.settings import CoordinatorSettings, MemberSettings
from cluster.errors import UserError
from tests.unit.test_control_state import CONTRACT, FACTS, SIZES, UNKNOWN_FIELD

DEADLINE_S = 20


@contextmanager
def coordinator(folder: Path, **more: int) -> Iterator[str]:
    """The address of one that runs in a thread."""
    address = f"unix:{folder / 'coordinator'}"
    loop, started, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def run() -> None:
        async with serving(CoordinatorSettings(address=address, policy=Policy(), **more)):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)
        loop.close()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with coordinator(tmp_path) as one:
        yield one


def join(address: str, role: Role, *, start_timeout_s: float = DEADLINE_S, vllm: str = "0.32.0") -> Member:
    settings = MemberSettings(address=address, role=role, name=role, start_timeout_s=start_timeout_s)
    return Member(settings, vllm_version=vllm, engine_sizes=SIZES if role == "target" else None)


def together(*sides: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(sides)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(side) for side in sides]]


@pytest.fixture
def pair(address: str) -> Iterator[tuple[Member, Member]]:
    with join(address, "target") as target, join(address, "draft") as draft:
        yield target, draft


def agree(pair: tuple[Member, Member]) -> None:
    target, draft = pair
    assert together(lambda: target.agree(FACTS["target"]), lambda: draft.agree(FACTS["draft"])) == [CONTRACT, CONTRACT]


def test_two_members_from_hello_to_channel(pair: tuple[Member, Member]) -> None:
    target, draft = pair
    assert draft.meet_peer().engine_sizes == EngineSizes(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=40_960
    )
    agree(pair)
    together(lambda: target.accept(CONTRACT), lambda: draft.accept(CONTRACT))
    together(lambda: target.ready(CONTRACT), lambda: draft.ready(CONTRACT))
    assert target.epoch == draft.epoch == 1
    address, options = ChannelAddress(kind="shm", location="x", num_slots=2), RoundOptions(num_prefill_lookahead=1)

    def open_channel() -> object:
        offer = draft.await_channel()
        draft.accept_channel()
        return offer.address, offer.round_options

    offered, opened = together(lambda: target.offer_channel(address, options), open_channel)
    assert offered is None
    assert opened == (address, options)


def test_the_barrier_holds_until_both_are_there(pair: tuple[Member, Member]) -> None:
    target, draft = pair
    agree(pair)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(target.accept, CONTRACT)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        draft.accept(CONTRACT)
        waiting.result(DEADLINE_S)


def test_a_refusal_is_the_same_error_on_both_sides(pair: tuple[Member, Member]) -> None:
    def refused(member: Member, **facts: object) -> str:
        with pytest.raises(ContractError) as error:
            member.agree(**facts)
        return str(error.value)

    target, draft = pair
    other = FACTS["draft"].to_json().replace("151936", "7")
    texts = together(
        lambda: refused(target, facts=FACTS["target"]),
        lambda: refused(draft, facts=type(FACTS["draft"]).from_json(other)),
    )
    assert texts[0] == texts[1]
    assert texts[0].startswith("vocab_size is 151936 on the target and 7 on the draft: ")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (UserError("checkpoint /x", "it lacks fc", "take another"), ControlError, "checkpoint /x: it lacks fc"),
        (
            ContractError("dtype", target="a", draft="b", reason="r", remedy="m"),
            ContractError,
            "dtype is a on the target",
        ),
        (
            ContractViolation(
                "cache_config.cache_dtype",
                old="auto",
                new="fp8",
                reason="sealed",
                writer=Writer(class_name="RewritingAttention", function="__init__", location="x.py:1"),
            ),
            ContractError,
            "RewritingAttention in __init__ .x.py:1. wrote fp8",
        ),
    ],
)
def test_why_one_side_gives_up_is_raised_on_the_other(
    pair: tuple[Member, Member], error: Exception, kind: type[UserError], said: str
) -> None:
    target, draft = pair
    agree(pair)
    with pytest.raises(type(error)), draft.reporting():
        raise error
    with pytest.raises(kind, match=said):
        target.accept(CONTRACT)


def test_a_peer_that_leaves_ends_the_wait_and_names_the_phase(pair: tuple[Member, Member]) -> None:
    target, draft = pair
    agree(pair)
    begun = time.monotonic()
    draft.close()
    with pytest.raises(
        ControlError, match=r"target waited for the draft to accept the contract: the draft is lost: .*left"
    ):
        target.accept(CONTRACT)
    assert time.monotonic() - begun < 5


def test_a_wait_that_takes_too_long_ends(address: str) -> None:
    waited = "target waited for a draft to join: it has not in 0 s"
    with join(address, "target", start_timeout_s=0.2) as target, pytest.raises(ControlError, match=waited):
        target.meet_peer()


def test_another_vllm_is_refused_before_anything_is_loaded(address: str) -> None:
    with join(address, "target") as target, join(address, "draft", vllm="0.33.0") as draft:
        for member in (target, draft):
            with pytest.raises(ContractError, match=r"vllm_version is 0.32.0 on the target and 0.33.0 on the draft"):
                member.meet_peer()


def test_a_second_target_finds_the_place_taken(address: str, pair: tuple[Member, Member]) -> None:
    settings = MemberSettings(address=address, role="target", name="another")
    with pytest.raises(ControlError, match="has the place of the target already"):
        Member(settings, vllm_version="0.32.0", engine_sizes=SIZES)
    agree(pair)


def test_a_target_that_is_started_again_meets_the_next_draft(address: str) -> None:
    with join(address, "target") as first, join(address, "target") as second:
        with pytest.raises(ControlError, match="a later incarnation"):
            first.meet_peer()
        with join(address, "draft") as draft:
            agree((second, draft))


def test_bytes_that_are_no_message_end_their_own_stream_only(address: str, pair: tuple[Member, Member]) -> None:
    with grpc.insecure_channel(address) as channel:
        send = channel.stream_stream("/dspark.v1.ControlService/Join")
        for foreign in (b"\xff\xff\xff\xff", b"GET / HTTP/1.1"):
            with pytest.raises(grpc.RpcError):
                list(send(iter([foreign])))
        for unknown in (b"", UNKNOWN_FIELD):
            assert list(send(iter([unknown]))) == []
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            list(send(iter([bytes(MAX_MESSAGE_BYTES + 1)])))
    agree(pair)


def test_a_coordinator_that_goes_ends_the_wait(tmp_path: Path) -> None:
    with coordinator(tmp_path) as address:
        target = join(address, "target")
    with target, pytest.raises(ControlError, match=r"the coordinator at unix:.* is gone"):
        target.meet_peer()


def test_an_address_that_cant_be_listened_on_is_said() -> None:
    async def serve() -> None:
        async with serving(CoordinatorSettings(address="unix:/no/such/folder/x", policy=Policy())):
            pytest.fail("it listens nowhere")

    with pytest.raises(UserError, match="can't be listened on"):
        asyncio.run(serve())


DRAFT = """
import sys
from pathlib import Path
from cluster.contract.facts import SideFacts
from cluster.control.member import Member
from cluster.control.options import MAX_MESSAGE_BYTES
from cluster.control.settings import MemberSettings
member = Member(MemberSettings(address=sys.argv[1], role="draft", name="draft"), vllm_version="0.32.0")
print(member.meet_peer().name, flush=True)
for step in sys.stdin:
    if step == "agree\\n":
        contract = member.agree(SideFacts.from_json(Path(sys.argv[2]).read_text()))
    elif step == "accept\\n":
        member.accept(contract)
    elif step == "ready\\n":
        member.ready(contract)
    print(step, end="", flush=True)
"""


class DraftProcess:
    """A draft without a model, which goes on step by step."""

    def __init__(self, folder: Path, address: str) -> None:
        (folder / "facts").write_text(FACTS["draft"].to_json())
        self.popen = subprocess.Popen(
            [sys.executable, "-c", DRAFT, address, folder / "facts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self, name: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{name}\n")
        self.popen.stdin.flush()


STEPS = ("join", "agree", "accept", "ready")


def target_to(phase: str, target: Member, draft: DraftProcess) -> Callable[[], object]:
    """Go through the phases before this one; the call that then waits for the draft."""
    calls: dict[str, Callable[[], object]] = {
        "join": lambda: target.agree(FACTS["target"]),
        "agree": lambda: target.accept(CONTRACT),
        "accept": lambda: target.ready(CONTRACT),
        "ready": lambda: target.offer_channel(ChannelAddress(), RoundOptions()),
    }
    target.meet_peer()
    for before, step in pairwise(STEPS):
        if before == phase:
            break
        draft.step(step)
        calls[before]()
    return calls[phase]


@pytest.mark.parametrize("phase", STEPS)
def test_a_draft_that_is_killed_ends_its_targets_wait_at_once(phase: str, address: str, tmp_path: Path) -> None:
    with join(address, "target") as target:
        draft = DraftProcess(tmp_path, address)
        wait = target_to(phase, target, draft)
        draft.popen.kill()
        begun = time.monotonic()
        with pytest.raises(ControlError, match=r"the draft is lost: .* its process has ended"):
            wait()
        assert time.monotonic() - begun < 2
        draft.popen.wait()


def test_a_draft_that_is_stopped_is_noticed_by_its_silence(tmp_path: Path) -> None:
    quick = coordinator(tmp_path, heartbeat_interval_ms=100, heartbeat_timeout_ms=1_000)
    with quick as address, join(address, "target") as target:
        draft, told = DraftProcess(tmp_path, address), threading.Event()
        target_to("ready", target, draft)
        target.on_silent_peer(told.set)
        draft.popen.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        assert told.wait(DEADLINE_S)
        assert time.monotonic() - begun < 3
        draft.popen.kill()
        draft.popen.wait()


def test_a_process_that_ends_before_it_is_there_is_named() -> None:
    child = ChildProcess("draft", "cluster.no_such_module", {})
    with pytest.raises(UserError, match="the draft's process: it ended with exit code 1"):
        child.await_start()
    child.stop(1.0)
