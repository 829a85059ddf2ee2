"""The coordinator as an actor, in real Ray: members come to it over gRPC, and a restart forgets nothing."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.coordinator import COORDINATOR_ACTOR, PairView
from cluster.contract.policy import Policy
from tests.cluster.waiting import eventually
from tests.control import CONTRACT, DEADLINE_S, join, pair_up

pytestmark = pytest.mark.usefixtures("two_nodes")


@pytest.fixture
def coordinator() -> Iterator[Any]:
    actor = COORDINATOR_ACTOR.options(name="coordinator").remote(Policy(), 2, "127.0.0.1")
    yield actor
    ray.get(actor.stop.remote())
    ray.kill(actor)


def process_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def restart(actor: Any) -> None:
    before = process_of(actor)
    ray.kill(actor, no_restart=False)
    eventually(lambda: process_of(actor) != before, deadline_s=DEADLINE_S)  # the old one may answer once more


def view(coordinator: Any) -> list[PairView]:
    return ray.get(coordinator.pairs.remote())


def test_each_pair_has_its_own(coordinator: Any) -> None:
    first, second = ray.get(coordinator.addresses.remote())
    with join(first, "target") as target, join(first, "draft") as draft, join(second, "target"):
        pair_up(target, draft)
        here, there = view(coordinator)
        assert (here.epoch, here.digest) == (1, CONTRACT.digest)
        assert {(member.name, member.activity) for member in here.members} == {("target", "ready"), ("draft", "ready")}
        assert (there.epoch, there.digest) == (0, "")
        assert [member.activity for member in there.members] == ["waiting"]


def test_a_restart_goes_on_where_it_ended(coordinator: Any) -> None:
    """At the same addresses, with the contract, and with an epoch that no message of an earlier pair has."""
    addresses = ray.get(coordinator.addresses.remote())
    with join(addresses[0], "target") as target, join(addresses[0], "draft") as draft:
        pair_up(target, draft)
    restart(coordinator)
    assert ray.get(coordinator.addresses.remote()) == addresses
    assert (view(coordinator)[0].epoch, view(coordinator)[0].digest) == (1, CONTRACT.digest)
    with join(addresses[0], "target") as target, join(addresses[0], "draft") as draft:
        pair_up(target, draft)
        assert target.epoch == draft.epoch == 2
    assert view(coordinator)[0].epoch == 2
