"""`bench --address` as a user sees it; the server and gRPC are real, the engine is scripted."""

import asyncio
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from actors.cli import app
from cluster.bench.load.generator import Load, LoadProgress, run_load
from cluster.bench.load.overhead import bottleneck
from cluster.bench.load.records import LoadResult
from cluster.bench.measures import median_itl_s
from cluster.client import AsyncClient, Request, Stopping, TextPrompt
from tests.unit.bench.conftest import Answering
from tests.unit.serving.conftest import Served

# How busy the machine of the tests is shall not matter.
SMALL = ("--num-prompts", 6, "--num-warmups", 1, "--max-tokens", 5, "--max-lag", 1000, "--max-spread", 1000)
STEP_S = 0.02
DEADLINE_S = 120
"""For a command to start, to work or to end on a machine that does other things."""


def words(address: str, folder: Path, *more: object) -> list[str]:
    return ["bench", "--address", address, "--output", str(folder), *map(str, (*SMALL, *more))]


def bench(served: Served, folder: Path, *more: object) -> Result:
    return CliRunner().invoke(app, words(served.server.address, folder, *more))


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())  # type: ignore[no-any-return]


def run_files(folder: Path) -> dict[str, int]:
    """With the time of their writing."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "runs").glob("*.json")}


def test_a_bench_writes_what_it_measured(start: Callable[..., Served], tmp_path: Path) -> None:
    result = bench(start(step_s=STEP_S), tmp_path, "--concurrency", 1, "--concurrency", 3, "--goodput", "ttft:10000")
    assert result.exit_code == 0, result.output
    whole = results(tmp_path)
    assert [cell["name"] for cell in whole["cells"]] == ["server, concurrency 1", "server, concurrency 3"]
    assert whole["unit"] == "server"
    run = json.loads(next((tmp_path / "runs").glob("*.json")).read_text())
    assert [request["output_tokens"] for request in run["requests"]] == [5] * 6
    assert run["figures"]["total_output_tokens"] == 30
    assert run["figures"]["median_tpot_ms"] >= 1e3 * STEP_S
    assert run["figures"]["request_goodput"] == run["figures"]["request_throughput"]
    assert len(run_files(tmp_path)) == 6
    assert "report: " in result.stderr
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["concurrency"] for row in rows] == ["1", "3"]


def test_a_sweep_that_is_killed_goes_on_where_it_stopped(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start(step_s=STEP_S)
    for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)):
        there = len(run_files(tmp_path)) if (tmp_path / "runs").exists() else 0
        command = [
            sys.executable,
            "-m",
            "actors.cli",
            *words(served.server.address, tmp_path, "--concurrency", 1, "--repeats", 8),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            deadline_s = time.monotonic() + DEADLINE_S
            while not (tmp_path / "runs").exists() or len(run_files(tmp_path)) == there:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            os.kill(process.pid, sent)
            _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == code, said
    assert "the same command again runs what is missing" in said
    before = run_files(tmp_path)
    assert 2 <= len(before) < 8
    assert results(tmp_path)["cells"][0]["status"] == "incomplete"
    result = bench(served, tmp_path, "--concurrency", 1, "--repeats", 8)
    assert result.exit_code == 0, result.output
    after = run_files(tmp_path)
    assert len(after) == 8
    assert all(after[name] == before[name] for name in before)
    assert results(tmp_path)["cells"][0]["name"] == "server, concurrency 1"


def test_a_failed_request_fails_its_cell_and_the_command(start: Callable[..., Served], tmp_path: Path) -> None:
    result = bench(start(step_s=STEP_S), tmp_path, "--concurrency", 2, "--request-timeout", 0.03)
    assert result.exit_code == 1, result.output
    (cell,) = results(tmp_path)["cells"]
    assert cell["status"] == "failed"
    assert "6 of 6 requests failed (DEADLINE_EXCEEDED" in cell["why"]
    assert cell["figures"] == {}
    assert "status-failed" in (tmp_path / "report.html").read_text()


def test_a_folder_of_another_sweep_is_refused(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start()
    bench(served, tmp_path, "--concurrency", 1)
    before = run_files(tmp_path)
    result = bench(served, tmp_path, "--concurrency", 2)
    assert result.exit_code == 2
    assert "it belongs to another sweep, which differs in concurrencies" in result.stderr
    assert run_files(tmp_path) == before


def test_another_server_is_another_sweep(start: Callable[..., Served], tmp_path: Path) -> None:
    result = bench(start(step_s=STEP_S), tmp_path, "--concurrency", 1)
    assert result.exit_code == 0, result.output
    before = run_files(tmp_path)
    result = bench(start(step_s=STEP_S), tmp_path, "--concurrency", 1)
    assert result.exit_code == 2
    assert "it belongs to another sweep, which differs in address" in result.stderr
    assert run_files(tmp_path) == before


@pytest.mark.parametrize("ended", [True, False])
def test_another_model_behind_the_same_address_is_another_sweep(
    start: Callable[..., Served], tmp_path: Path, ended: bool
) -> None:
    served = start(step_s=STEP_S)
    assert bench(served, tmp_path, "--concurrency", 1).exit_code == 0
    assert results(tmp_path)["plan"]["model"] == "scripted"
    if not ended:
        next((tmp_path / "runs").glob("*.json")).unlink()
    before = run_files(tmp_path)
    served.engine.model = replace(served.engine.model, name="other")
    result = bench(served, tmp_path, "--concurrency", 1)
    assert result.exit_code == 2, result.output
    assert "it belongs to another sweep, of the model scripted, and this server's is other" in result.stderr
    assert run_files(tmp_path) == before


def test_a_server_that_was_away_is_named_once_it_is_back(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start(step_s=STEP_S)
    address = served.server.address
    served.loop.run(served.server.stop())
    assert bench(served, tmp_path, "--concurrency", 1).exit_code == 1
    assert results(tmp_path)["plan"]["model"] is None
    start(step_s=STEP_S, port=int(address.rpartition(":")[2]))
    result = CliRunner().invoke(app, words(address, tmp_path, "--concurrency", 1))
    assert result.exit_code == 0, result.output
    assert results(tmp_path)["plan"]["model"] == "scripted"


def test_a_finished_sweep_is_shown_again_without_its_server(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start(step_s=STEP_S)
    assert bench(served, tmp_path, "--concurrency", 1).exit_code == 0
    before = run_files(tmp_path)
    served.loop.run(served.server.stop())
    result = bench(served, tmp_path, "--concurrency", 1)
    assert result.exit_code == 0, result.output
    assert "UNAVAILABLE" in result.stderr
    assert run_files(tmp_path) == before


def test_a_second_bench_asks_the_same_and_finds_nothing_in_the_prefix_cache(
    answering: Callable[[list[str]], tuple[str, Answering]], tmp_path: Path
) -> None:
    address, engine = answering(["all right"])
    for output in ("one", "other"):
        CliRunner().invoke(app, words(address, tmp_path / output, "--concurrency", 1))
    one, other = engine.asked[: len(engine.asked) // 2], engine.asked[len(engine.asked) // 2 :]
    assert len(one) == 3 * (6 + 1)
    assert [request.prompt for request in one] == [request.prompt for request in other]
    assert len({request.cache_salt for request in engine.asked}) == len(engine.asked)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--arm", "plain"), "--arm beside --address"),
        (("--dummy", "qwen3-8b"), "--dummy beside --address"),
        (("--dataset", "absent.jsonl"), "questions absent.jsonl: it can't be read"),
        (("--goodput", "fast"), "--goodput fast: it is no objective"),
        (("--chat",), "scripted has no chat template"),
    ],
)
def test_what_the_user_got_wrong_is_said(
    start: Callable[..., Served], tmp_path: Path, more: tuple[object, ...], said: str
) -> None:
    result = bench(start(), tmp_path / "out", *more)
    assert result.exit_code in (1, 2)
    assert said in result.stderr


def test_a_server_that_is_away_fails_every_cell(tmp_path: Path) -> None:
    command = ["bench", "--address", "127.0.0.1:1", "--output", str(tmp_path), "--concurrency", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "UNAVAILABLE" in results(tmp_path)["cells"][0]["why"]


def load(count: int, **options: Any) -> Load:
    request = Request(prompt=TextPrompt(text="Hello"), stopping=Stopping(max_tokens=4))
    plain = Load(
        requests=(request,) * count,
        request_rate=float("inf"),
        burstiness=1.0,
        concurrency=None,
        ramp_up_s=0.0,
        seed=0,
        request_timeout_s=None,
    )
    return replace(plain, **options)


def run(served: Served, what: Load, tell: Callable[[LoadProgress], None] = lambda _: None) -> LoadResult:
    async def run_it() -> LoadResult:
        async with AsyncClient(served.server.address) as client:
            return await run_load(client, what, tell, 0.02)

    return asyncio.run(run_it())


def test_no_more_run_at_once_than_allowed(start: Callable[..., Served]) -> None:
    result = run(start(step_s=0.01), load(9, concurrency=2))
    assert result.peak_concurrency == 2
    assert [record.index for record in result.records] == list(range(9))
    # Those that waited did so here; their own times begin when they are sent.
    waited = [record.queue_s for record in result.records]
    assert waited[-1] > waited[0]
    assert all(record.ttft_s < record.e2el_s for record in result.records)


def test_a_rate_spreads_the_requests(start: Callable[..., Served]) -> None:
    result = run(start(step_s=0.001), load(20, request_rate=40.0, burstiness=50.0))
    due = [record.due_s for record in result.records]
    assert due == sorted(due)
    assert 0.3 < due[-1] < 0.8
    for record in result.records:
        assert record.sent_s >= record.due_s


def test_a_generator_that_is_held_up_is_found_out(start: Callable[..., Served]) -> None:
    held_up = run(start(step_s=0.05), load(4), tell=lambda _: time.sleep(0.15))
    assert held_up.overhead.lag_max_s > 0.1
    assert bottleneck(held_up.overhead, median_itl_s(held_up), 0.25) is not None


def test_progress_is_told(start: Callable[..., Served]) -> None:
    told: list[int] = []
    run(start(step_s=0.03), load(6, concurrency=1), tell=lambda progress: told.append(progress.ended))
    assert told == sorted(told)
    assert 0 < told[-1] <= 6
