"""The Ray that a command starts where there is none, and that ends with the cluster."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from actors import local_ray
from actors.local_ray import find_local_ray, start_local_ray
from actors.ports import free_port
from tests.checkpoints import make_pair

DEADLINE_S = 400
"""A whole cluster may start in it, on a machine that does other things."""


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


def test_a_port_that_another_process_takes_meanwhile_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        found = iter([taken])
        monkeypatch.setattr(local_ray, "free_port", lambda host: next(found, None) or free_port(host))
        local = start_local_ray()
    assert local.address != f"127.0.0.1:{taken}"
    assert find_local_ray() == local
    local.stop()


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_brings_its_own_cluster_and_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    pair = make_pair("qwen3-dspark-agreeing", folder)
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_gpu_blocks": 16}
    config = {
        "model": {"target": str(pair.target), "draft": str(pair.draft)},
        "engine": sizes | {"tensor_parallel_size": ranks},
        "pools": {"target": {"num_gpus": 0}},
        "gateway": {"port": 0},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config))
    lines = [{"token_ids": [start, start + 1], "max_tokens": 12, "ignore_eos": True} for start in (7, 40, 100)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = run(
        "batch",
        "--config",
        folder / "cluster.yaml",
        "--input",
        folder / "prompts.jsonl",
        "--output",
        folder / "out.jsonl",
    )
    assert result.returncode == 0, result.stderr
    assert "starts Ray on this machine" in result.stderr
    assert "pair 0: epoch 1, contract " in result.stderr
    assert "stopped coordinator, draft-0, gateway, target-0" in result.stderr
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert sorted(answer["index"] for answer in answers) == [0, 1, 2]
    assert {len(answer["choices"][0]["token_ids"]) for answer in answers} == {12}
    assert find_local_ray() is None
    assert not list(tmp_path.iterdir())
