"""Pairs of engines, one pair of arms at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import Arm, Arms, pair_settings

# Random weights make drafts that depend on all of the context; agreeing pairs have rounds of every length.
PAIRS = ("qwen3-dspark", "qwen3-dspark-agreeing", "gemma4-dspark", "qwen3-dflash", "qwen3-dflash-agreeing")


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Any]]:
    """Start an engine that lives until the session ends: the first of a process's engines to close takes the others'
    distributed state from them."""
    engines: list[InProcessEngine] = []

    def start_one(kind: type[InProcessEngine], settings: EngineSettings, **more: Any) -> InProcessEngine:
        engines.append(kind(settings, **more))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session", params=PAIRS)
def arms(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> Iterator[Arms]:
    settings = pair_settings(request.param, tmp_path_factory.mktemp(request.param))
    separate = start(SeparateEngine, settings)
    yield Arms(name=request.param, colocated=Arm(start(InProcessEngine, settings)), separate=Arm(separate))
    separate.stop_draft()  # its memory is needed for the next pair's
