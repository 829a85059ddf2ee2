"""An output that a run left is gone on with, and no other."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from cluster.batch.lines import BatchInput
from cluster.batch.output import BatchOutput
from cluster.errors import UserError
from tests.unit.batch.conftest import ScriptedTime, WriteInput

DEFAULTS = {"temperature": 0.0}


@pytest.fixture
def batch(write_input: WriteInput) -> BatchInput:
    return write_input(*({"prompt": text, "id": text} for text in "abcd"), defaults=DEFAULTS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def write(path: Path, batch: BatchInput, *indices: int) -> None:
    with BatchOutput(path, batch, DEFAULTS) as output:
        output.begin("model")
        for index in indices:
            output.append(batch.lines[index], {"text": "ä\n"})


def refused(path: Path, batch: BatchInput, defaults: dict[str, Any] = DEFAULTS, model: str = "model") -> str:
    with pytest.raises(UserError) as refusal, BatchOutput(path, batch, defaults) as output:
        output.begin(model)
    return str(refusal.value)


def test_what_is_written_is_known_again(path: Path, batch: BatchInput) -> None:
    write(path, batch, 2, 0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"index": 2, "id": "c", "text": "ä\n"},
        {"index": 0, "id": "a", "text": "ä\n"},
    ]
    with BatchOutput(path, batch, DEFAULTS) as output:
        assert output.done == {0, 2}
        output.begin("model")
        output.append(batch.lines[1], {})
    with BatchOutput(path, batch, DEFAULTS) as output:
        assert output.done == {0, 1, 2}


def test_a_last_line_that_was_cut_off_is_removed_wherever_that_was(path: Path, batch: BatchInput) -> None:
    write(path, batch, 0)
    whole = path.read_bytes()
    write(path, batch, 1)
    both = path.read_bytes()
    for length in range(len(both)):
        path.write_bytes(both[:length])
        with BatchOutput(path, batch, DEFAULTS) as output:
            assert output.done == ({0} if length >= len(whole) else set())
            output.begin("model")
            output.append(batch.lines[3], {})
        lines = [json.loads(line)["index"] for line in path.read_text().splitlines()]
        assert lines == ([0, 3] if length >= len(whole) else [3])


@pytest.mark.parametrize("spoilt", ["{}", "[]", "x", '{"index": 0}', '{"index": 4}', '{"index": true}', "\0\0"])
def test_a_line_that_is_not_the_batchs_is_said(path: Path, batch: BatchInput, spoilt: str) -> None:
    write(path, batch, 0)
    with path.open("a") as file:
        file.write(f"{spoilt}\n")
    assert "out.jsonl, line 2: it isn't a line of this batch, or there twice" in refused(path, batch)


def test_another_batch_is_refused(path: Path, batch: BatchInput, write_input: WriteInput) -> None:
    write(path, batch, 0)
    assert "its model is model, this one's other" in refused(path, batch, model="other")
    assert 'its defaults is {"temperature": 0.0}' in refused(path, batch, {"temperature": 0.5})
    assert "its input_sha256 is" in refused(path, write_input({"prompt": "other"}))
    Path(f"{path}.batch.json").write_text("{}")
    assert "out.jsonl.batch.json: schema: it is missing" in refused(path, batch)
    Path(f"{path}.batch.json").unlink()
    assert "no out.jsonl.batch.json beside it" in refused(path, batch)
    assert len(path.read_text().splitlines()) == 1, "a refusal changes nothing"


def test_two_runs_at_once_are_refused(path: Path, batch: BatchInput) -> None:
    with BatchOutput(path, batch, DEFAULTS):
        assert "another process is writing it" in refused(path, batch)
    write(path, batch, 0)


def test_where_nothing_can_be_written(tmp_path: Path, batch: BatchInput) -> None:
    assert "it can't be written (No such file or directory)" in refused(tmp_path / "absent" / "out.jsonl", batch)


def test_a_full_disk_is_said_and_what_it_took_of_a_line_is_removed(path: Path, batch: BatchInput) -> None:
    write(path, batch, 0)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with BatchOutput(path, batch, DEFAULTS) as output:
        output.begin("model")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, unlimited[1]))
        try:
            with pytest.raises(UserError, match=r"it can't be written \(File too large\)"):
                output.append(batch.lines[1], {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not path.read_bytes().endswith(b"\n")
    with BatchOutput(path, batch, DEFAULTS) as output:
        assert output.done == {0}
    assert path.read_bytes().endswith(b"\n")


def test_lines_reach_the_disk_within_a_second(path: Path, batch: BatchInput, monkeypatch: pytest.MonkeyPatch) -> None:
    time, synced = ScriptedTime(), list[int]()
    with BatchOutput(path, batch, DEFAULTS, clock=time.clock) as output:
        output.begin("model")
        monkeypatch.setattr(os, "fsync", synced.append)
        output.append(batch.lines[0], {})
        assert not synced
        time.now_s = 1.5
        output.append(batch.lines[1], {})
        assert len(synced) == 1
        output.append(batch.lines[2], {})
        assert len(synced) == 1
    assert len(synced) == 2


def test_failures_are_those_of_the_last_run(path: Path, batch: BatchInput) -> None:
    failures = Path(f"{path}.failed.jsonl")
    with BatchOutput(path, batch, DEFAULTS) as output:
        output.begin("model")
        output.fail(batch.lines[1], "INTERNAL", "why")
    assert json.loads(failures.read_text()) == {"index": 1, "id": "b", "status": "INTERNAL", "error": "why"}
    write(path, batch, 1)
    assert not failures.exists()
