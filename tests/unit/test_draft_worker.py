"""The draft worker's end, which is how Ray comes to start another."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors import draft
from cluster.config import ClusterConfig, ModelConfig
from cluster.control.refusals import ControlError
from cluster.control.settings import MemberSettings
from cluster.speculation import draft_process
from cluster.speculation.draft_process import DraftSettings
from tests.checkpoints import make_pair

DEADLINE_S = 20
LOST = ControlError("draft-0 waited for the target to load its model", "the target is lost", "start again")


class Worker:
    """One whose process fails with `error`, if there is one, before or after it `joins`; `ended` has its exit codes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joins = False
        self.error: Exception | None = None
        self.ended: list[int] = []
        monkeypatch.setattr(draft_process, "run", self._run)
        monkeypatch.setattr(draft_process, "end", self.ended.append)
        monkeypatch.setattr(draft, "was_restarted", lambda: False)
        monkeypatch.setattr(draft, "_TO_TELL_S", 0.1)
        pair = make_pair("qwen3-dspark", folder)
        config = ClusterConfig(model=ModelConfig(target=str(pair.target), draft=str(pair.draft)))
        member = MemberSettings(address="unix:nowhere", role="draft", name="draft-0")
        self.actor = draft.DraftWorker(config, member, "127.0.0.1")

    def _run(self, _: DraftSettings, joined: Callable[[], None]) -> None:
        if self.joins:
            joined()
        if self.error is not None:
            raise self.error


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(tmp_path, monkeypatch)


@pytest.mark.parametrize("error", [LOST, ValueError("of vLLM")], ids=["foreseen", "unforeseen"])
def test_whoever_starts_it_is_told_why_it_cant_join(worker: Worker, error: Exception) -> None:
    worker.error = error
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(worker.actor.run())
    assert worker.ended == []


@pytest.mark.parametrize("error", [LOST, RuntimeError("CUDA error")], ids=["foreseen", "unforeseen"])
def test_one_that_fails_when_it_has_joined_tells_and_leaves_its_place_to_the_next(
    worker: Worker, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one that has served nobody waits for the reason."""

    async def start() -> None:
        with pytest.raises(type(error), match=str(error)):
            await worker.actor.run()
        assert worker.ended == []
        async with asyncio.timeout(DEADLINE_S):
            while not worker.ended:
                await asyncio.sleep(0.01)

    worker.joins, worker.error = True, error
    asyncio.run(start())
    assert worker.ended == [1]
    assert str(error) in capsys.readouterr().err


def test_one_that_can_serve_no_more_leaves_its_place_to_the_next(worker: Worker) -> None:
    worker.joins = True
    asyncio.run(worker.actor.run())
    assert worker.ended == [1]
