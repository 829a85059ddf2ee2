"""Which replicas are drained with their nodes, and which come back."""

import math

from actors.leaving import DrainedReplicas

NODE_OF = {"target-0": "a", "target-1": "b", "target-2": ""}


def test_replicas_are_drained_once_with_their_node_and_before_it_is_killed() -> None:
    drained = DrainedReplicas()
    assert drained.to_drain({}, NODE_OF, grace_s=30) == {}
    assert drained.to_drain({"a": math.inf, "b": 5.0}, NODE_OF, grace_s=30) == {"target-0": 30, "target-1": 4.0}
    assert drained.to_drain({"a": 0.5}, NODE_OF, grace_s=30) == {"target-0": 0.0}
    drained.add("target-0", "a")
    assert drained.to_drain({"a": math.inf}, NODE_OF, grace_s=30) == {}


def test_one_that_was_started_on_another_node_is_used_again() -> None:
    drained = DrainedReplicas()
    drained.add("target-0", "a")
    assert drained.take_returned({"a": math.inf}, NODE_OF) == []
    assert drained.take_returned({}, NODE_OF | {"target-0": ""}) == [], "it is lost"
    assert drained.take_returned({}, NODE_OF) == [], "it was drained by hand, and has come back where it was"
    moved = NODE_OF | {"target-0": "c"}
    assert drained.take_returned({"c": 9.0}, moved) == []
    assert drained.to_drain({"c": 9.0}, moved, grace_s=30) == {"target-0": 8.0}
    assert drained.take_returned({}, moved) == ["target-0"]
    assert drained.take_returned({}, moved) == []


def test_a_replica_that_was_drained_before_it_was_known_where_it_is_stays_drained() -> None:
    drained = DrainedReplicas()
    drained.add("target-2", "")
    assert drained.take_returned({}, NODE_OF | {"target-2": "a"}) == []


def test_a_gateway_that_is_new_knows_the_earlier_ones_drained_replicas() -> None:
    earlier = DrainedReplicas()
    for replica, node in NODE_OF.items():
        earlier.add(replica, node)
    drained = DrainedReplicas(earlier.node_of)
    assert drained.node_of == NODE_OF
    assert drained.to_drain({"a": math.inf}, NODE_OF, grace_s=30) == {}
    moved = NODE_OF | {"target-0": "c", "target-2": "c"}
    assert drained.take_returned({}, moved) == ["target-0"]
    assert drained.node_of == {"target-1": "b", "target-2": ""}


def test_one_that_is_drained_again_while_it_is_lost_was_where_it_was() -> None:
    drained = DrainedReplicas({"target-0": "a"})
    drained.add("target-0", "")
    assert drained.node_of == {"target-0": "a"}
