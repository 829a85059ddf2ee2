"""Coordinator and members over real gRPC, on one Unix socket; the silent member is a process of its own."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.control import CONTRACT, DEADLINE_S, FACTS, SIZES, agree, coordinator, join, pair_up, together
from tests.unit.test_control_state import UNKNOWN_FIELD


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with coordinator(tmp_path) as one:
        yield one


@pytest.fixture
def pair(address: str) -> Iterator[tuple[Member, Member]]:
    with join(address, "target") as target, join(address, "draft") as draft:
        yield target, draft


def test_two_members_from_hello_to_channel(pair: tuple[Member, Member]) -> None:
    target, draft = pair
    assert draft.meet_peer().engine_sizes == EngineSizes(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=40_960
    )
    pair_up(target, draft)
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
    agree(*pair)
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
    agree(*pair)
    with pytest.raises(type(error)), draft.reporting():
        raise error
    with pytest.raises(kind, match=said):
        target.accept(CONTRACT)


def test_a_peer_that_leaves_ends_the_wait_and_names_the_phase(pair: tuple[Member, Member]) -> None:
    target, draft = pair
    agree(*pair)
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
    agree(*pair)


def test_a_target_that_is_started_again_meets_the_next_draft(address: str) -> None:
    with join(address, "target") as first, join(address, "target") as second:
        with pytest.raises(ControlError, match="a later incarnation"):
            first.meet_peer()
        with join(address, "draft") as draft:
            agree(second, draft)


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
    agree(*pair)


def test_a_coordinator_that_goes_ends_the_wait(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with coordinator(tmp_path) as address:
        target = join(address, "target")
    with target, pytest.raises(ControlError, match=r"the coordinator at unix:.* is gone"):
        target.meet_peer()
    assert capfd.readouterr().err == "", "it goes quietly"


def test_an_address_that_cant_be_listened_on_is_said() -> None:
    async def serve() -> None:
        async with serving(CoordinatorSettings(address="unix:/no/such/folder/x", policy=Policy())):
            pytest.fail("it listens nowhere")

    with pytest.raises(UserError, match="can't be listened on"):
        asyncio.run(serve())


PEER = """
import sys
from cluster.contract.facts import SideFacts
from tests.control import FACTS, join
role = sys.argv[2]
member = join(sys.argv[1], role)
member.meet_peer()
for step in sys.stdin:
    if step == "agree\\n":
        contract = member.agree(FACTS[role])
    elif step == "accept\\n":
        member.accept(contract)
    elif step == "ready\\n":
        member.ready(contract)
"""


class PeerProcess:
    """A side without a model, in a process of its own, which goes on step by step."""

    def __init__(self, address: str, role: Role) -> None:
        command = [sys.executable, "-c", PEER, address, role]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def step(self, name: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{name}\n")
        self.popen.stdin.flush()


STEPS = ("join", "agree", "accept", "ready")
"""What a peer has done last, when it dies."""


def come_to(step: str, member: Member, peer: PeerProcess, role: Role) -> Callable[[], object]:
    """Let both go through the steps before; the call of `member` that then waits for its peer."""
    calls: dict[str, Callable[[], object]] = {
        "join": lambda: member.agree(FACTS[role]),
        "agree": lambda: member.accept(CONTRACT),
        "accept": lambda: member.ready(CONTRACT),
        "ready": member.await_channel,
    }
    member.meet_peer()
    for before, following in pairwise(STEPS):
        if before == step:
            break
        peer.step(following)
        calls[before]()
    return calls[step]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("role", "others"), [("target", "draft"), ("draft", "target")])
def test_a_peer_that_is_killed_ends_the_wait_at_once(step: str, role: Role, others: Role, address: str) -> None:
    with join(address, role) as member:
        peer = PeerProcess(address, others)
        wait = come_to(step, member, peer, role)
        peer.popen.kill()
        begun = time.monotonic()
        with pytest.raises(ControlError, match=f"the {others} is lost: .* its process has ended"):
            wait()
        assert time.monotonic() - begun < 2
        peer.popen.wait()


def test_a_peer_that_is_stopped_is_noticed_by_its_silence(tmp_path: Path) -> None:
    quick = coordinator(tmp_path, heartbeat_interval_ms=100, heartbeat_timeout_ms=1_000)
    with quick as address, join(address, "target") as target:
        peer, told = PeerProcess(address, "draft"), threading.Event()
        wait = come_to("ready", target, peer, "target")
        target.on_silent_peer(told.set)
        peer.popen.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(ControlError, match="its process is silent"):
            wait()
        assert told.is_set()
        assert time.monotonic() - begun < 3
        peer.popen.kill()
        peer.popen.wait()


def test_a_process_that_ends_before_it_is_there_is_named() -> None:
    child = ChildProcess("draft", "cluster.no_such_module", {})
    with pytest.raises(UserError, match="the draft's process: it ended with exit code 1"):
        child.await_start()
    child.stop(1.0)
