"""What is said of a replica that has no place in a cluster."""

import pytest

from actors.fit import Bundle, NodeView, selects, why_not

H200 = {"ray.io/accelerator-type": "H200"}


def node(name: str, cpus: float, gpus: float = 0, *, free: float | None = None, **labels: str) -> NodeView:
    total = {"CPU": cpus, "GPU": gpus}
    return NodeView(name=name, total=total, free=total if free is None else {"CPU": free}, labels=labels)


def target(**more: str) -> Bundle:
    return Bundle(role="target", index=0, resources={"CPU": 1, "GPU": 1}, labels=more)


def draft(**more: str) -> Bundle:
    return Bundle(role="draft", index=0, resources={"CPU": 1}, labels=more)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node("a", 4)], "target 0 needs 1 CPU and 1 GPU, and no node has as much"),
        ([node("a", 4, 1, free=0)], "target 0 needs 1 CPU and 1 GPU, and what there is of it is taken"),
        ([node("a", 4, 1)], "draft 0 needs 1 CPU on a node with pool: draft, and no node has these labels"),
        (
            [node("a", 4, 1), node("b", 0.5, pool="draft")],
            "draft 0 needs 1 CPU on a node with pool: draft, and no node with these labels has as much",
        ),
        (
            [node("a", 4, 1), node("b", 1, 1, pool="draft")],
            "no node has room for target 0 and draft 0 together, and pools.hosts is same",
        ),
    ],
)
def test_the_first_process_that_does_not_fit(nodes: list[NodeView], why: str) -> None:
    assert why_not([target(), draft(pool="draft")], "same", nodes) == why


def test_one_node_for_two_hosts() -> None:
    assert "only one node has room" in why_not([target(), draft()], "different", [node("a", 4, 1)])


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("H200", True),
        ("H100", False),
        ("!H100", True),
        ("!H200", False),
        ("in(A100, H200)", True),
        ("in(A100,H100)", False),
        ("!in(A100, H200)", False),
    ],
)
def test_selectors_as_ray_reads_them(selector: str, chosen: bool) -> None:
    assert selects(H200, "ray.io/accelerator-type", selector) == chosen
    assert selects({}, "ray.io/accelerator-type", selector) == selector.startswith("!")
