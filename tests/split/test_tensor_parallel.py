"""A target of two tensor-parallel ranks beside a draft of one: what the pair in one engine of two ranks answers."""

from typing import Any

import pytest

from tests.split.arms import greedy, pair_settings
from tests.split.processes import Child
from tests.split.ranks import colocated_ranks, ranks_beside_a_draft

PAIR = "qwen3-dspark-agreeing"
REQUESTS = [greedy(range(40, 60), 30), greedy(range(7, 11), 24), greedy(range(100, 180), 30)]
DEADLINE_S = 600
"""For three processes to import vLLM on two cores, and one of them twice."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the pair in one engine, and with the draft in a process of its own."""
    settings = pair_settings(PAIR, tmp_path_factory.mktemp(PAIR), tensor_parallel_size=2)
    colocated, separate = (
        Child(function, settings, REQUESTS).report(DEADLINE_S) for function in (colocated_ranks, ranks_beside_a_draft)
    )
    return colocated, separate


def test_tokens_drafts_and_accepted_counts_are_the_same(reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    colocated, separate = reports
    assert separate["run"] == colocated["run"]
    assert separate["lost_at_first"] is None
    assert sum(map(sum, colocated["run"]["accepted"])) > 0


def test_a_draft_that_is_killed_costs_proposals_alone(reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """On both ranks in the same step, or their tokens would differ; and it comes back on both."""
    colocated, separate = reports
    assert separate["lost_then"]
    assert separate["killed"] == colocated["run"]["tokens"]
    assert separate["again"]["tokens"] == colocated["run"]["tokens"]
    assert sum(map(sum, separate["again"]["accepted"])) > 0


def test_a_rank_ends_by_itself_with_its_engine(reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    colocated, _ = reports
    assert colocated["ended"] == 0


def test_a_rank_that_is_killed_ends_the_engine(reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, separate = reports
    assert separate["error"].startswith("tensor-parallel rank 1: its process has ended with exit code -9;")
    assert separate["said_after_s"] < 10
    assert separate["left"] == []
