"""A lost draft comes back: coordinator and members over real gRPC, and what the engine's two halves tell each other."""

import threading
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
