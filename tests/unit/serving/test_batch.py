"""`batch --address` as a user sees it; the server is real, its engine is scripted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from actors.cli import app
from cluster.serving.limits import Limits
from tests.unit.serving.conftest import DEADLINE_S, Served

SMALL = Limits(max_running=2, max_queued=0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Hello", "id": f"line-{number}", "max_tokens": 1 + number % 3} for number in range(20)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def batch(served: Served, prompts: Path, *more: object) -> Result:
    words = ["--address", served.server.address, "--input", prompts, "--output", prompts.with_name("out.jsonl"), *more]
    return CliRunner().invoke(app, ["batch", *map(str, words)])


def written(prompts: Path) -> list[dict[str, Any]]:
    file = prompts.with_name("out.jsonl")
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def test_every_line_is_answered_once(start: Callable[..., Served], prompts: Path) -> None:
    served = start()
    result = batch(served, prompts)
    assert result.exit_code == 0, result.output
    assert "20 of 20 lines; 39 tokens" in result.stderr
    assert f"output: {prompts.with_name('out.jsonl')}" in result.stderr
    answers = sorted(written(prompts), key=lambda line: line["index"])
    assert [line["id"] for line in answers] == [f"line-{number}" for number in range(20)]
    assert [line["choices"][0]["text"] for line in answers[:3]] == ["a", "aa", "aaa"]
    again = batch(served, prompts)
    assert again.exit_code == 0
    assert "20 of 20 lines have their answers from before" in again.stderr
    assert len(served.engine.closed) == 20


def test_more_at_once_than_the_server_takes_are_repeated(start: Callable[..., Served], prompts: Path) -> None:
    result = batch(start(step_s=0.02, limits=SMALL), prompts, "--concurrency", 6)
    assert result.exit_code == 0, result.output
    assert "repeated calls" in result.stderr
    assert sorted(line["index"] for line in written(prompts)) == list(range(20))


def test_what_the_server_refuses_of_its_own_has_failed(start: Callable[..., Served], prompts: Path) -> None:
    """A text's tokens are the server's to count."""
    lines = prompts.read_text().splitlines()
    lines[3] = json.dumps({"prompt": "x" * 300})
    prompts.write_text("\n".join(lines))
    served = start()
    result = batch(served, prompts)
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT" in result.stderr
    failed = json.loads(prompts.with_name("out.jsonl.failed.jsonl").read_text())
    assert (failed["index"], failed["status"]) == (3, "INVALID_ARGUMENT")
    assert "300 tokens; the context holds 256" in failed["error"]
    assert len(written(prompts)) == 19


@pytest.mark.parametrize(
    ("line", "more", "said"),
    [
        ("{", (), "line 21 is not JSON"),
        ('{"prompt": "a", "logprobs": 99}', (), "line 21: output.logprobs: 99; at most 20; change the line"),
        (None, ("--temperature", 9), "line 1: sampling.temperature: 9 is not in its range"),
        (None, ("--namespace", "x"), "--namespace beside --address"),
        (None, ("--token-file", "absent"), "token file absent: it can't be read"),
        (None, ("--address", "127.0.0.1:1"), "server 127.0.0.1:1: UNAVAILABLE"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_nothing_runs(
    start: Callable[..., Served], prompts: Path, line: str | None, more: tuple[object, ...], said: str
) -> None:
    if line is not None:
        prompts.write_text(f"{prompts.read_text()}{line}\n")
    served = start()
    result = batch(served, prompts, *more)
    assert result.exit_code == 2, result.output
    (shown,) = result.stderr.strip().splitlines()
    assert said in shown
    assert not served.engine.closed
    assert not written(prompts)


def test_a_run_that_is_killed_and_one_that_is_stopped_are_gone_on_with(
    start: Callable[..., Served], prompts: Path
) -> None:
    """No line twice, none lost."""
    served = start(step_s=0.1)
    for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)):
        before = len(written(prompts))
        words = ["--address", served.server.address, "--input", prompts, "--output", prompts.with_name("out.jsonl")]
        command = [sys.executable, "-m", "actors.cli", "batch", *map(str, words), "--concurrency", "2"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            deadline_s = time.monotonic() + DEADLINE_S
            while len(written(prompts)) == before:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            os.kill(process.pid, sent)
            _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == code, said
        assert before < len(written(prompts)) < 20
    assert "the same command again runs what is missing" in said
    served.wait_for(lambda: not served.engine.running)  # what was interrupted doesn't go on
    assert batch(served, prompts).exit_code == 0
    assert sorted(line["index"] for line in written(prompts)) == list(range(20))
