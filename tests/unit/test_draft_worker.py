"""The draft worker's end, which is how Ray comes to start another."""

import asyncio
from pathlib import Path

import pytest

from actors import draft
from cluster.config import ClusterConfig, ModelConfig
from cluster.control.refusals import ControlError
from cluster.control.settings import MemberSettings
from cluster.speculation import draft_process
from tests.checkpoints import make_pair


class EndedError(Exception):
    """In the place of the process's end."""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> draft.DraftWorker:
    """One whose target is lost while the two meet."""

    def run(*_: object) -> None:
        raise ControlError("draft-0 waited for the target to load its model", "the target is lost", "start again")

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(draft_process, "run", run)
    monkeypatch.setattr(draft_process, "end", end)
    monkeypatch.setattr(draft, "call_own", lambda _: None)
    monkeypatch.setattr(draft, "was_restarted", lambda: False)
    pair = make_pair("qwen3-dspark", tmp_path)
    config = ClusterConfig(model=ModelConfig(target=str(pair.target), draft=str(pair.draft)))
    member = MemberSettings(address="unix:nowhere", role="draft", name="draft-0")
    return draft.DraftWorker(config, member, "127.0.0.1")


def test_whoever_starts_it_is_told_why_it_cant_pair(worker: draft.DraftWorker) -> None:
    with pytest.raises(ControlError):
        asyncio.run(worker.run())


def test_one_that_ray_has_started_again_leaves_its_place_to_the_next(
    worker: draft.DraftWorker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft, "was_restarted", lambda: True)
    with pytest.raises(EndedError):
        asyncio.run(worker.run())
    assert "the target is lost" in capsys.readouterr().err
