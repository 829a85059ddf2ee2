"""The bench of faults in its short form: every row meets its bar on what an idle machine isn't needed for."""

from typing import Final

import pytest

from cluster.bench.faults.figures import Figure
from tests.faults.short import Rows, run_short, values

SHORT = ["--requests", "18", "--kills", "1", "--cut", "3", "--every", "10", "--cancels", "64", "--soak", "180"]

ALONE_BAR_PERCENT: Final = 80.0
"""Of plain speed, in the median step: 95 are an idle machine's."""

GROWTH_BAR_PERCENT: Final = 0.5
"""Of the memory, in 90 s: 0.01 were measured, and 0.24 on a machine so busy that it cost the draft nine times."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return run_short("cluster.bench.faults", tmp_path_factory.mktemp("pair"), *SHORT)


def test_no_request_fails_and_every_output_is_exact(rows: Rows) -> None:
    assert values(rows, "failed or not exact") == {
        "draft stopped and continued": "0",
        "draft killed": "0",
        "network cut for 3 s": "0",
        "coordinator killed, then the draft lost": "0",
        "1 in 10 messages corrupt, truncated, repeated, out of order": "0",
        "server told to end": "0",
    }


def test_epochs_go_on_with_the_next_coordinator(rows: Rows) -> None:
    assert rows["coordinator killed, then the draft lost"]["epochs go on"].value == "yes"


def test_a_target_goes_on_without_its_draft(rows: Rows) -> None:
    figures = rows["draft away"]
    assert figures["away all the time"].value == "yes"
    assert percent(figures["in the median step"]) >= ALONE_BAR_PERCENT


def test_cancels_leave_no_block(rows: Rows) -> None:
    assert rows["64 cancels"]["leaked blocks"].value == "0"


def test_nothing_grows(rows: Rows) -> None:
    figures = rows["180 s of mixed load"]
    assert figures["growth of segments"].value == "+0.00%"
    assert figures["growth of descriptors"].value == "+0.00%"
    assert percent(figures["growth of memory"]) < GROWTH_BAR_PERCENT


def test_overload_is_refused_and_what_is_admitted_is_answered(rows: Rows) -> None:
    figures = rows["2 times a server's capacity"]
    assert int(figures["admitted"].value) > 0
    assert int(figures["refused"].value) > 0
    assert figures["failed"].value == "0"


def test_a_server_that_is_told_to_end_cuts_nothing_off(rows: Rows) -> None:
    assert rows["server told to end"]["exit code"].value == "0"


def percent(figure: Figure) -> float:
    return float(figure.value.removesuffix("%"))
