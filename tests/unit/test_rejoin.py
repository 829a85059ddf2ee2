"""A lost draft comes back: coordinator and members over real gRPC, and what the engine's two halves tell each other."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.contract.again import negotiate_again
from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError
from cluster.contract.policy import Policy
from cluster.control.member import Member
from cluster.control.refusals import ControlError
from cluster.control.settings import MemberSettings
from cluster.engine import draft_context, request_drafts
from cluster.engine.draft_context import Followed
from cluster.speculation.rejoin import Rejoin
from tests.cluster.waiting import eventually
from tests.control import CONTRACT, DEADLINE_S, FACTS, SIZES, coordinator, join, pair_up, together


def again(address: str, role: Any, last_epoch: int) -> Member:
    settings = MemberSettings(address=address, role=role, name=role, start_timeout_s=DEADLINE_S)
    sizes = SIZES if role == "target" else None
    return Member(settings, vllm_version="0.32.0", engine_sizes=sizes, last_epoch=last_epoch)


def test_both_come_into_another_pairing_under_the_contract_that_they_hold(tmp_path: Path) -> None:
    """Though the draft's process is another, which finds less memory free, and the model by another path."""
    with coordinator(tmp_path) as address:
        with join(address, "target") as target, join(address, "draft") as draft:
            pair_up(target, draft)
        with again(address, "target", 1) as target, join(address, "draft") as draft:
            other = replace(FACTS["draft"], kv_cache_bytes=CONTRACT.pool_bytes("draft"), model="/elsewhere/draft")
            agreed = together(lambda: target.agree(FACTS["target"], held=CONTRACT), lambda: draft.agree(other))
            assert agreed == [CONTRACT, CONTRACT]
            assert target.epoch == draft.epoch == 2


def test_epochs_go_on_where_the_coordinator_has_forgotten_them(tmp_path: Path) -> None:
    with coordinator(tmp_path) as address, again(address, "target", 7) as target, join(address, "draft") as draft:
        together(target.meet_peer, draft.meet_peer)
        assert target.epoch == draft.epoch == 8


def test_a_draft_that_cant_keep_the_contract_is_refused_by_its_field() -> None:
    small = replace(FACTS["draft"], kv_cache_bytes=CONTRACT.pool_bytes("draft") - 1)
    with pytest.raises(ContractError, match="kv_cache_bytes"):
        negotiate_again(FACTS["target"], small, Policy(), CONTRACT)
    other = replace(FACTS["draft"], config_digest="0" * 64)
    with pytest.raises(ContractError, match=r"draft\.config_digest"):
        negotiate_again(FACTS["target"], other, Policy(), CONTRACT)


def test_two_sides_with_two_contracts_are_refused(tmp_path: Path) -> None:
    more = negotiate_again_with(CONTRACT.num_blocks - 1)
    with coordinator(tmp_path) as address, join(address, "target") as target, join(address, "draft") as draft:

        def refused(member: Member, facts: Any, held: KVContract) -> str:
            with pytest.raises(ContractError) as error:
                member.agree(facts, held=held)
            return error.value.field

        fields = together(
            lambda: refused(target, FACTS["target"], CONTRACT), lambda: refused(draft, FACTS["draft"], more)
        )
        assert fields == ["contract.digest"] * 2


def negotiate_again_with(num_blocks: int) -> KVContract:
    from cluster.contract.negotiate import negotiate

    sides = [replace(FACTS[role], num_gpu_blocks_override=num_blocks) for role in ("target", "draft")]
    return negotiate(sides[0], sides[1], Policy())


def test_a_target_tries_until_a_draft_is_there() -> None:
    tries: list[str] = []
    ended, offered = threading.Event(), threading.Event()

    def pair_again() -> str:
        tries.append("try")
        if len(tries) < 3:
            raise ControlError("a draft", "none yet", "wait")
        return "new"

    rejoin: Rejoin[str] = Rejoin(end=lambda _: ended.set(), pair_again=pair_again, offer=lambda _: offered.set())
    rejoin.lost("old")
    assert offered.wait(DEADLINE_S)
    assert ended.is_set()
    assert len(tries) == 3
    rejoin.stop()


def test_a_target_tries_again_whatever_went_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """Neither what ends a lost draft nor what looks for another knows all that a GPU's driver can say."""
    faults: list[Exception] = [RuntimeError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"), OSError("no space left")]
    offered = threading.Event()

    def end(_: str) -> None:
        raise RuntimeError("cuMemFree: CUDA_ERROR_UNKNOWN")

    def pair_again() -> str:
        if faults:
            raise faults.pop(0)
        return "new"

    rejoin: Rejoin[str] = Rejoin(end=end, pair_again=pair_again, offer=lambda _: offered.set())
    with caplog.at_level(logging.ERROR):
        rejoin.lost("old")
        assert offered.wait(DEADLINE_S)
    for said in ("CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY", "no space left"):
        assert said in caplog.text
    assert caplog.text.count("Traceback") == 3
    rejoin.stop()


def rejoining() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "dspark-rejoin"}


def test_a_rejoin_that_is_stopped_leaves_no_thread() -> None:
    """Which would keep the engine that it is for."""
    before = rejoining()
    rejoin: Rejoin[str] = Rejoin(end=print, pair_again=lambda: "new", offer=print)
    (thread,) = rejoining() - before
    rejoin.stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_draft_that_comes_back_after_its_target_has_ended_is_ended() -> None:
    before = rejoining()
    tried, may_come = threading.Event(), threading.Event()
    ended: list[str] = []
    offered: list[str] = []

    def pair_again() -> str:
        tried.set()
        assert may_come.wait(DEADLINE_S)
        return "late"

    rejoin: Rejoin[str] = Rejoin(end=ended.append, pair_again=pair_again, offer=offered.append)
    rejoin.lost("old")
    assert tried.wait(DEADLINE_S)
    rejoin.stop()
    may_come.set()
    eventually(lambda: rejoining() <= before, deadline_s=DEADLINE_S)
    assert (ended, offered) == (["old", "late"], [])


def worker(**attributes: Any) -> Any:
    """A target's, of which nothing is built."""
    from cluster.engine.target_worker import TargetWorker

    worker: Any = TargetWorker.__new__(TargetWorker)
    for name, value in attributes.items():
        setattr(worker, name, value)
    return worker


def test_a_worker_that_shuts_down_ends_its_pair_first_and_then_its_part_in_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cluster.engine.contract_worker import ContractWorker

    said: list[str] = []

    def saying(what: str) -> Callable[..., None]:
        return lambda *_: said.append(what)

    monkeypatch.setattr(ContractWorker, "shutdown", saying("vLLM waits for the stream"))
    speculator = SimpleNamespace(close=saying("the pair ends"), leave_ranks=saying("the gate is closed"))
    worker(model_runner=SimpleNamespace(speculator=speculator), _exported=None).shutdown()
    assert said == ["the pair ends", "vLLM waits for the stream", "the gate is closed"]
    worker(model_runner=None, _exported=None).shutdown()


def test_a_further_rank_s_worker_shuts_down_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.engine.contract_worker import ContractWorker
    from cluster.speculation.following import FollowingSpeculator

    ended: list[str] = []
    monkeypatch.setattr(ContractWorker, "shutdown", lambda _: ended.append("vLLM's part"))
    speculator: Any = FollowingSpeculator.__new__(FollowingSpeculator)
    speculator._gate = SimpleNamespace(close=lambda: ended.append("the gate"))
    worker(model_runner=SimpleNamespace(speculator=speculator), _exported=None).shutdown()
    assert ended == ["vLLM's part", "the gate"]
    assert speculator._gate is None


def test_a_channel_through_which_no_rounds_begin_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft serves it until then, and nobody else."""
    from cluster.speculation import remote

    closed: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    channel = SimpleNamespace(close=lambda: closed.append("channel"))
    monkeypatch.setattr(remote, "offer_rounds", lambda *_: (channel, None))
    monkeypatch.setattr(remote, "tables_to_send", lambda *_: ())
    monkeypatch.setattr(remote, "target_rounds", fail)
    speculator: Any = remote.RemoteSpeculator.__new__(remote.RemoteSpeculator)
    for name in ("_shared_kv", "_settings", "_pace", "_times", "device"):
        setattr(speculator, name, None)
    speculator._layers_by_group, speculator._block_tables = [], SimpleNamespace(input_block_tables=[])
    speculator.vllm_config = SimpleNamespace(num_prefill_lookahead_tokens=0)
    speculator._family = SimpleNamespace(reads_input_ids=False)
    speculator.faults = SimpleNamespace(around=lambda same: same)
    member: Any = SimpleNamespace(epoch=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        speculator.open_rounds(member, CONTRACT)
    assert closed == ["channel"]


def test_rounds_that_dont_warm_up_are_closed(tmp_path: Path) -> None:
    closed: list[str] = []

    def fail() -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    rounds = SimpleNamespace(warm_up=fail, close=lambda: closed.append("rounds"))
    draft = SimpleNamespace(rounds=rounds)
    with coordinator(tmp_path) as address, join(address, "target") as member:
        target = worker(
            device=SimpleNamespace(type="cpu"),
            model_runner=SimpleNamespace(speculator=SimpleNamespace(open_rounds=lambda *_: draft)),
            _last_epoch=0,
            _member=member,
            _contract=CONTRACT,
            _join=lambda: member,
            pair_again=lambda _: None,
        )
        with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
            target._pair_again()
    assert closed == ["rounds"]


def test_a_worker_that_has_shut_down_meanwhile_comes_into_no_other_pairing(tmp_path: Path) -> None:
    """Its member would be there for ever."""
    gone = worker(_facts=FACTS["target"], _contract=CONTRACT, _has_left=True)
    with coordinator(tmp_path) as address:
        member = join(address, "target")
        with pytest.raises(ControlError, match=r"the coordinator at .* is gone"):
            gone.pair_again(member)
        assert member._ended.wait(DEADLINE_S)


def test_only_a_new_epoch_has_everything_computed_again() -> None:
    followed = Followed(may_rest=False)
    assert [followed.follow(epoch) for epoch in (1, 1, 0, 0, 2, 2, 0, 2)] == [False] * 4 + [True] + [False] * 3
    assert followed.computed == 2
    assert followed.is_there


def test_a_lost_draft_leaves_no_draft_slots() -> None:
    """And with one again, each request has as many as it takes."""
    few = SimpleNamespace(extra_args={request_drafts.MAX_DRAFT_TOKENS: 1})
    scheduler = SimpleNamespace(requests={}, vllm_config=SimpleNamespace(additional_config=None))
    outcomes = []
    for epoch in (1, 0, 2):
        draft_context._of(scheduler).follow(epoch)
        scheduler.requests = {
            "a": SimpleNamespace(spec_token_ids=[-1] * 4, sampling_params=None),
            "b": SimpleNamespace(spec_token_ids=[-1] * 4, sampling_params=few),
        }
        request_drafts._cut(scheduler, ["a", "b", "gone"])
        outcomes.append([len(request.spec_token_ids) for request in scheduler.requests.values()])
    assert outcomes == [[4, 1], [0, 0], [4, 1]]
