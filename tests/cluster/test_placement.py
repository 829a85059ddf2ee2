"""Places in a real Ray cluster of two nodes: one with 2 CPUs for targets, one with 1 CPU for drafts."""

import os
from collections.abc import Iterator

import pytest
import ray

from actors.placement import ReplicaPlaces, nodes, place, release
from cluster.config import Hosts, PoolConfig, PoolsConfig
from cluster.errors import UserError
from tests.cluster.waiting import eventually

pytestmark = pytest.mark.usefixtures("two_nodes")

DEADLINE_S = 10
DRAFT = PoolConfig(labels={"pool": "draft"})


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release()
    eventually(  # nodes report what they have a few times a second
        lambda: sum(node.free.get("CPU", 0) for node in nodes()) >= 3,
        deadline_s=DEADLINE_S,
        otherwise="places are held after their release",
    )


def found(pools: PoolsConfig, *, with_draft: bool = True, timeout_s: float = DEADLINE_S) -> list[ReplicaPlaces]:
    return place(pools, with_draft=with_draft, timeout_s=timeout_s, say=lambda _: None)


def refused(pools: PoolsConfig, *, timeout_s: float = 0.5) -> str:
    with pytest.raises(UserError) as refusal:
        found(pools, timeout_s=timeout_s)
    return str(refusal.value)


def pool_of(node_id: str) -> str:
    return next(node["Labels"]["pool"] for node in ray.nodes() if node["NodeID"] == node_id)


@pytest.mark.parametrize("hosts", ["any", "same"])
def test_a_pair_on_one_host(hosts: Hosts) -> None:
    (places,) = found(PoolsConfig(hosts=hosts))
    assert places.share_host


def test_a_draft_on_the_host_that_its_labels_name() -> None:
    """Though only the draft's pool has labels: the target must leave it the one node that has them."""
    (places,) = found(PoolsConfig(hosts="different", draft=DRAFT))
    assert places.draft is not None
    assert (pool_of(places.target.node_id), pool_of(places.draft.node_id)) == ("target", "draft")
    assert not places.share_host


def test_an_actor_runs_in_its_place() -> None:
    @ray.remote
    class Where:
        def node(self) -> str:
            return ray.get_runtime_context().get_node_id()

    (places,) = found(PoolsConfig(hosts="different", draft=DRAFT))
    assert places.draft is not None
    actor = Where.options(**places.draft.actor_options()).remote()
    assert ray.get(actor.node.remote()) == places.draft.node_id
    ray.kill(actor)


def test_a_pair_on_one_host_sees_the_gpus_of_both() -> None:
    @ray.remote
    class Process:
        def visible(self) -> list[str]:
            return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    pool = PoolConfig(num_gpus=1)
    (places,) = found(PoolsConfig(target=pool, draft=pool), timeout_s=DEADLINE_S)
    assert places.draft is not None
    actors = [Process.options(**place.actor_options()).remote() for place in (places.target, places.draft)]
    target, draft = ray.get([actor.visible.remote() for actor in actors])
    assert target == draft[::-1]
    assert sorted(target) == ["0", "1"]
    assert places.channel("auto") == "cuda_ipc"
    for actor in actors:
        ray.kill(actor)


def test_two_targets_without_a_draft() -> None:
    both = found(PoolsConfig(replicas=2, target=PoolConfig(labels={"pool": "!draft"})), with_draft=False)
    assert [pool_of(places.target.node_id) for places in both] == ["target", "target"]
    assert all(places.draft is None for places in both)


def test_a_second_replica_that_has_no_room() -> None:
    line = refused(PoolsConfig(replicas=2, hosts="different", draft=DRAFT), timeout_s=3)
    assert line.startswith("no place for draft 1 and target 1 in 3 s: draft 1 needs 1 CPU on a node with pool: draft")
    assert "and what there is of it is taken" in line
    assert "(CPU 0 of 1 free, GPU 0 of 0 free; pool=draft)" in line
    assert "the cluster has" in line


def test_a_gpu_that_nobody_has() -> None:
    line = refused(PoolsConfig(draft=PoolConfig(num_gpus=1, labels={"pool": "draft"})))
    assert "draft 0 needs 1 CPU and 1 GPU on a node with pool: draft, and no node with these labels has as much" in line


def test_a_label_that_ray_cannot_read() -> None:
    line = refused(PoolsConfig(target=PoolConfig(labels={"pool": "in("})))
    assert line.startswith("the places of target 0: Ray refuses them")
