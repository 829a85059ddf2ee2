"""Three arms of a real pair in a real Ray, a sweep that is killed and gone on with, and the report of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

from tests.checkpoints import make_pair
from tests.unit.bench.report_page import assert_shows

DEADLINE_S = 1500
"""For all arms on a machine that does other things: an arm imports vLLM two or three times."""

LOADS = ("--concurrency", "1", "--concurrency", "3")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")  # its token would be in the home folder
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def sweep(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that was killed in its first arm, and then ran to its end."""
    folder = tmp_path_factory.mktemp("bench")
    pair = make_pair("qwen3-dspark-agreeing", folder)
    plain = {
        "model": {"target": str(pair.target), "draft": str(pair.draft)},
        "engine": {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 64},
        # How busy the machine of the tests is shall not matter: here, and in the command's last flags.
        "channel": {"stall_limit_s": None, "rest_slow_drafts": False},
        "ray": {"address": ray_address, "namespace": "tests-of-bench"},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(plain))
    output = folder / "out"
    command = [sys.executable, "-m", "actors.cli", "bench", str(folder / "cluster.yaml"), "--output", str(output)]
    command += [*LOADS, "--num-prompts", "3", "--num-warmups", "1", "--max-tokens", "12", "--input-tokens", "16"]
    command += ["--no-chat", "--ignore-eos", "--max-lag", "1000", "--max-spread", "1000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + DEADLINE_S
        while not run_files(output):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    before = run_files(output)
    assert len(before) < 6
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    assert f"plain: {len(before)} runs are there from before" in result.stderr
    assert len(run_files(output)) == 18
    assert before.items() <= run_files(output).items()
    return output


def run_files(output: Path) -> dict[str, int]:
    """With the time of their writing."""
    return {file.name: file.stat().st_mtime_ns for file in (output / "runs").glob("*.json")}


def results(sweep: Path) -> dict[str, Any]:
    return json.loads((sweep / "results.json").read_text())  # type: ignore[no-any-return]


def test_every_arm_answers_under_every_load(sweep: Path) -> None:
    cells = results(sweep)["cells"]
    assert [(cell["arm"], cell["concurrency"]) for cell in cells] == [
        (arm, together) for arm in ("plain", "colocated", "separate") for together in (1, 3)
    ]
    for cell in cells:
        assert (cell["status"], cell["repeats"]) == ("ok", 3), cell["why"]
        assert cell["hardware"] == {"count": 1, "unit": "replica"}
        assert cell["figures"]["total_output_tokens"]["median"] == 36
        assert cell["cluster"]["kv_tokens"] == 64 * 128  # the block size of a CPU
    assert len(results(sweep)["comparisons"]) == 6


def test_both_drafts_are_the_same_draft(sweep: Path) -> None:
    plain, _, colocated, _, separate, _ = results(sweep)["cells"]
    assert plain["acceptance"] is None
    assert colocated["acceptance"]["acceptance_length"] > 1
    assert separate["acceptance"] == colocated["acceptance"]
    assert separate["figures"]["rounds_without_draft"] == colocated["figures"]["rounds_without_draft"]


def test_a_step_of_a_separate_draft_has_parts(sweep: Path) -> None:
    plain, _, colocated, _, separate, _ = (cell["figures"] for cell in results(sweep)["cells"])
    for arm in (plain, colocated):
        assert "step_draft_ms" not in arm
        assert arm["step_target_ms"] == arm["step_ms"]
    for part in ("target", "fuse", "encode", "transfer", "draft", "decode"):
        assert separate[f"step_{part}_ms"]["median"] > 0
    assert separate["bytes_to_draft"]["median"] > separate["bytes_to_target"]["median"] > 0
    # More tokens a step, so fewer steps for as many tokens.
    assert colocated["engine_steps"]["median"] < plain["engine_steps"]["median"]


def test_the_report_shows_the_results(sweep: Path) -> None:
    assert_shows((sweep / "report.html").read_text(), results(sweep))


def test_the_environment_is_kept(sweep: Path) -> None:
    whole = results(sweep)
    assert whole["environment"]["versions"]["ray"]
    (host,) = whole["cells"][0]["cluster"]["hosts"]
    assert host["cores"] == whole["environment"]["cores"]
    assert whole["cells"][0]["cluster"]["generator"] == "an actor on a node with engines"
