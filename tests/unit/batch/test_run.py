"""Each line is run to its answer or its failure, so many at once, and what passes by itself is repeated."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.batch.lines import BatchInput
from cluster.batch.output import BatchOutput
from cluster.batch.run import BatchRun, RunOptions
from cluster.batch.tally import Tally
from cluster.client import FinishReason
from cluster.errors import UserError
from tests.unit.batch.conftest import ScriptedClient, ScriptedTime, WriteInput, answer, failure

OPTIONS = RunOptions(concurrency=2, patience_s=60.0)
Run = Callable[..., tuple[BatchRun, Tally]]


@pytest.fixture
def batch(write_input: WriteInput) -> BatchInput:
    return write_input(*({"prompt": text} for text in "abcdef"))


@pytest.fixture
def time() -> ScriptedTime:
    return ScriptedTime()


@pytest.fixture
def run(batch: BatchInput, time: ScriptedTime, tmp_path: Path) -> Run:
    """What has no answer yet, by this client."""

    def run(client: ScriptedClient, options: RunOptions = OPTIONS) -> tuple[BatchRun, Tally]:
        with BatchOutput(tmp_path / "out.jsonl", batch, {}) as output:
            output.begin("model")
            tally = Tally(total=len(batch.lines), before=len(output.done))
            made = BatchRun(client, output, options, tally, clock=time.clock, sleep=time.sleep)
            asyncio.run(made.run([line for line in batch.lines if line.index not in output.done]))
        return made, tally

    return run


def written(tmp_path: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    file = tmp_path / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_every_line_has_its_answer(run: Run, tmp_path: Path) -> None:
    client = ScriptedClient()
    _, tally = run(client)
    lines = {line["index"]: line for line in written(tmp_path)}
    assert [lines[index]["choices"][0]["text"] for index in range(6)] == list("ABCDEF")
    assert lines[0]["usage"] == {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 3}
    choice = lines[0]["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([1, 2, 3], "length")
    assert choice["speculation"]["acceptance_length"] == 2.5
    assert choice["speculation"]["rounds_without_draft"] == 1
    assert client.most_running == 2
    assert tally.complete
    assert tally.rows() == [("OK", 6)]
    assert (tally.completion_tokens, tally.prompt_tokens) == (18, 24)
    assert tally.acceptance is not None
    assert tally.acceptance.rounds == 12


def test_a_full_queue_is_waited_for_as_long_as_it_says(run: Run, time: ScriptedTime) -> None:
    client = ScriptedClient({"b": [failure("RESOURCE_EXHAUSTED", 7.0), failure("RESOURCE_EXHAUSTED", 3.0)]})
    _, tally = run(client)
    assert client.asked.count("b") == 3
    first, second = time.slept
    assert 7.0 <= first <= 7.0 * 1.25
    assert 3.0 <= second <= 3.0 * 1.25
    assert (tally.retries, tally.complete) == (2, True)


def test_an_absent_replica_is_waited_for_longer_each_time(run: Run, time: ScriptedTime) -> None:
    _, tally = run(ScriptedClient({"a": [failure("UNAVAILABLE") for _ in range(5)]}))
    assert tally.complete
    assert all(later > earlier for earlier, later in zip(time.slept, time.slept[1:], strict=False))


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL", "DEADLINE_EXCEEDED"])
def test_a_failure_that_stays_is_no_answer_and_not_repeated(run: Run, tmp_path: Path, status: str) -> None:
    client = ScriptedClient({"c": [failure(status)]})
    made, tally = run(client)
    assert client.asked.count("c") == 1
    assert sorted(line["index"] for line in written(tmp_path)) == [0, 1, 3, 4, 5]
    assert written(tmp_path, "out.jsonl.failed.jsonl") == [
        {"index": 2, "id": None, "status": status, "error": "scripted"}
    ]
    assert not tally.complete
    assert tally.rows() == [("OK", 5), (status, 1)]
    assert not made.given_up
    _, again = run(client)
    assert client.asked.count("c") == 2, "the next run tries what failed, and that alone"
    assert len(client.asked) == 7
    assert again.complete
    assert again.rows() == [("OK", 6)]
    assert sorted(line["index"] for line in written(tmp_path)) == list(range(6))


def test_what_somebody_aborted_has_failed(run: Run, tmp_path: Path) -> None:
    response = answer("d")
    aborted = replace(response, choices=(replace(response.choices[0], finish_reason=FinishReason.ABORTED),))
    _, tally = run(ScriptedClient({"d": [aborted]}))
    assert tally.rows() == [("OK", 5), ("ABORTED", 1)]
    assert len(written(tmp_path)) == 5


def test_patience_ends_with_a_queue_that_stays_full_and_the_rest_is_tried(run: Run, time: ScriptedTime) -> None:
    made, tally = run(ScriptedClient({"a": [failure("RESOURCE_EXHAUSTED", 10.0) for _ in range(99)]}))
    assert tally.rows() == [("OK", 5), ("RESOURCE_EXHAUSTED", 1)]
    assert not made.given_up
    assert time.now_s <= OPTIONS.patience_s


def test_a_server_that_stays_away_is_given_up(run: Run, time: ScriptedTime, tmp_path: Path) -> None:
    away = {text: [failure("UNAVAILABLE") for _ in range(99)] for text in "cdef"}
    made, tally = run(ScriptedClient(away))
    assert made.given_up
    assert tally.rows() == [("OK", 2), ("UNAVAILABLE", 2), ("not run", 2)]
    assert time.now_s < 3 * OPTIONS.patience_s
    assert len(written(tmp_path)) == 2


def test_an_output_that_cannot_be_written_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise UserError("output out.jsonl", "it can't be written (No space left on device)", "mend that")

    monkeypatch.setattr(BatchOutput, "append", full)
    client = ScriptedClient()
    with pytest.raises(UserError, match="No space left"):
        run(client)
    assert len(client.asked) <= 4, "what follows would be lost, too"


def test_an_interruption_keeps_what_was_answered(batch: BatchInput, tmp_path: Path) -> None:
    class Stalling(ScriptedClient):
        async def generate(self, request: Any, *, timeout_s: float | None = None) -> Any:
            if len(self.asked) >= 3:
                stalled.set()
                await asyncio.Event().wait()
            return await super().generate(request, timeout_s=timeout_s)

    async def interrupted() -> None:
        with BatchOutput(tmp_path / "out.jsonl", batch, {}) as output:
            output.begin("model")
            tally = Tally(total=len(batch.lines), before=0)
            task = asyncio.create_task(BatchRun(Stalling(), output, OPTIONS, tally).run(batch.lines))
            await asyncio.wait_for(stalled.wait(), 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    stalled = asyncio.Event()
    asyncio.run(interrupted())
    assert len(written(tmp_path)) == 3
