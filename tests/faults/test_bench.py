"""The bench of faults in its short form: every row meets its bar on what an idle machine isn't needed for."""

import json
import subprocess
import sys

import pytest

from tests.checkpoints import make_pair

DEADLINE_S = 800

SHORT = ["--requests", "18", "--kills", "1", "--cut", "3", "--every", "10", "--cancels", "64", "--soak", "10"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The figures of each row, by their names."""
    pair = make_pair("qwen3-dspark-agreeing", tmp_path_factory.mktemp("pair"))
    command = [sys.executable, "-m", "cluster.bench.faults", "--target", str(pair.target), "--draft", str(pair.draft)]
    result = subprocess.run(
        [*command, *SHORT, "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.returncode in (0, 1), result.stderr
    print(result.stdout)
    report = json.loads(result.stdout)
    assert report["schema"] == "dspark-cluster/faults/1"
    return {row["fault"]: {each["name"]: each["value"] for each in row["figures"]} for row in report["rows"]}


def test_no_request_fails_and_every_output_is_exact(rows: dict[str, dict[str, str]]) -> None:
    failed = {fault: figures["failed or not exact"] for fault, figures in rows.items() if "draft back after" in figures}
    assert set(failed) == {
        "draft killed",
        "draft stopped and continued",
        "network cut for 3 s",
        "coordinator killed, then the draft lost",
    }
    assert set(failed.values()) == {"0"}


def test_epochs_go_on_with_the_next_coordinator(rows: dict[str, dict[str, str]]) -> None:
    assert rows["coordinator killed, then the draft lost"]["epochs go on"] == "yes"


def test_bad_messages_make_no_wrong_token(rows: dict[str, dict[str, str]]) -> None:
    assert rows["1 in 10 messages corrupt, truncated, repeated, out of order"]["failed or not exact"] == "0"


def test_cancels_leave_no_block(rows: dict[str, dict[str, str]]) -> None:
    assert rows["64 cancels"]["leaked blocks"] == "0"


def test_nothing_grows(rows: dict[str, dict[str, str]]) -> None:
    assert rows["10 s of mixed load"]["growth of segments"] == "+0.00%"
    assert rows["10 s of mixed load"]["growth of descriptors"] == "+0.00%"


def test_overload_is_refused_and_what_is_admitted_is_answered(rows: dict[str, dict[str, str]]) -> None:
    figures = rows["2 times a server's capacity"]
    assert int(figures["admitted"]) > 0
    assert int(figures["refused"]) > 0
    assert figures["failed"] == "0"


def test_a_server_that_is_told_to_end_cuts_nothing_off(rows: dict[str, dict[str, str]]) -> None:
    figures = rows["server told to end"]
    assert figures["cut off or not exact"] == "0"
    assert figures["exit code"] == "0"
