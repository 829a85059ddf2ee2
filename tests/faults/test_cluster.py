"""The bench of a cluster's faults in its short form: no request fails, and what was killed comes back."""

import pytest

from tests.faults.short import Rows, run_short, values


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DSPARK_CACHE", str(folder / "cache"))  # a Ray of its own
        environment.delenv("RAY_ADDRESS", raising=False)
        return run_short("actors.bench_faults", folder, "--requests", "24", "--kills", "1")


def test_no_request_fails_and_no_token_is_lost_or_repeated(rows: Rows) -> None:
    assert values(rows, "failed or not exact") == {
        "draft worker killed": "0",
        "target replica killed": "0",
        "coordinator and gateway killed": "0",
        "target replica drained": "0",
    }


def test_what_was_killed_was_at_work(rows: Rows) -> None:
    assert min(map(int, values(rows, "requests there").values())) > 0
    assert int(rows["coordinator and gateway killed"]["asked again by their clients"].value) > 0


def test_a_killed_drafts_replica_speculates_again(rows: Rows) -> None:
    figures = rows["draft worker killed"]
    assert figures["failed or not exact when it is back"].value == "0"
    assert int(figures["drafts accepted then"].value) > 0


def test_what_is_killed_is_known_in_time(rows: Rows) -> None:
    assert rows["draft worker killed"]["detected after"].is_met
    assert rows["target replica killed"]["detected after"].is_met


def test_a_drained_replica_runs_nothing(rows: Rows) -> None:
    figures = rows["target replica drained"]
    assert int(figures["moved to the other one"].value) > 0
    assert figures["came there afterwards"].value == "0"
    assert figures["its state"].value == "draining"


def test_nothing_is_left_of_a_cluster_that_is_stopped(rows: Rows) -> None:
    figures = rows["cluster stopped after that"]
    assert int(figures["processes seen"].value) > 0
    assert figures["orphan processes"].value == "0"
    assert figures["segments of shared memory left"].value == "0"
