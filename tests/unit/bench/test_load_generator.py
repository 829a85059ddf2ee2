"""Where the load generator's actor goes."""

from typing import Any

import pytest

from actors.load_generator import choose_node


def node(name: str, *, gpus: int = 0, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 4.0} | ({"GPU": float(gpus)} if gpus else {})
    return {"NodeID": name, "NodeManagerAddress": name, "Resources": resources, "Alive": alive}


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([node("gateway"), node("engines", gpus=1), node("spare", gpus=1), node("cpus")], "gateway"),
        ([node("gateway", gpus=1), node("engines", gpus=1), node("cpus")], "cpus"),
        ([node("engines", gpus=1), node("gateway", gpus=1)], "gateway"),
        ([node("engines"), node("gone", alive=False), node("gateway")], "gateway"),
    ],
)
def test_it_is_away_from_the_engines_where_it_can_be(nodes: list[dict[str, Any]], chosen: str) -> None:
    assert choose_node(nodes, "gateway", {"engines"}, anywhere=True) == chosen


def test_one_node_has_everything() -> None:
    assert choose_node([node("one", gpus=1)], "one", {"one"}, anywhere=True) == "one"


def test_it_is_beside_a_gateway_that_listens_on_its_own_host() -> None:
    nodes = [node("cpus"), node("one", gpus=1)]
    assert choose_node(nodes, "one", {"one"}, anywhere=False) == "one"
