"""The Ray that `up` starts where there is none, and that ends with the cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.local_ray import find_local_ray, start_local_ray

DEADLINE_S = 180


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "actors.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def of_session(leader: int) -> list[str]:
    """Processes of the session that `ray start` leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session, *_ = rest.split()
        if int(session) == leader and state != "Z":
            found.append(name)
    return found


def test_down_stops_it_whole(tmp_path: Path) -> None:
    local = start_local_ray()
    assert find_local_ray() == local
    assert len(of_session(local.pid)) > 3
    assert oct((Path(local.folder) / "token").stat().st_mode & 0o777) == "0o600"
    result = run("down")
    assert result.returncode == 0, result.stderr
    assert "there was no cluster" in result.stderr
    assert of_session(local.pid) == []
    assert not Path(local.folder).exists()
    assert not list(tmp_path.iterdir())
    assert find_local_ray() is None


def test_a_cluster_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    result = run("up", "--target", tmp_path / "nowhere", "--draft", tmp_path / "nowhere-either")
    assert result.returncode == 2
    assert "there is no such folder" in result.stderr.strip().splitlines()[-1]
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["status", "down"])
def test_there_is_no_cluster_to_ask(command: str) -> None:
    result = run(command)
    assert result.returncode == 2
    assert result.stderr == (
        "dspark-cluster: no cluster: this machine has none; start one with `dspark-cluster up`, or name one by "
        "--address\n"
    )
