"""Pairs of engines, one pair of arms at a time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import HYBRID_BLOCKS, Arm, Arms, pair_settings, separate_of

# The agreeing pairs: their rounds have every length, and where a token is blind their drafts depend on the context.
# What a channel carries is the same for all, so each has one of the two; but within a host the target's KV is mapped,
# and between hosts there is a mirror of it.
PAIRS = {
    "qwen3-dspark-agreeing": "shm",
    "gemma4-dspark-agreeing": "gloo",
    "qwen3-dflash-agreeing": "shm",
    "qwen3-eagle3-agreeing": "gloo",
    "qwen3-draft-model-agreeing": "shm",
    "gemma4-mtp-agreeing": "shm",
    "gemma4-mtp-agreeing by mirror": "gloo",
}


@pytest.fixture(scope="package")
def start() -> Iterator[Callable[..., Any]]:
    """Start an engine that lives until this folder's tests end: the first of a process's engines to close takes the
    others' distributed state from them."""
    engines: list[InProcessEngine] = []

    def start_one(kind: type[InProcessEngine], settings: EngineSettings, **more: Any) -> InProcessEngine:
        engines.append(kind(settings, **more))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="package", params=PAIRS)
def arms(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> Iterator[Arms]:
    name = request.param.partition(" ")[0]
    settings = pair_settings(name, tmp_path_factory.mktemp(name))
    colocated, separate = (
        replace(settings, num_gpu_blocks=blocks) for blocks in HYBRID_BLOCKS.get(name, (settings.num_gpu_blocks,) * 2)
    )
    # A draft's process that does what it always does, and on a signal forgets its context.
    how = {"channel": PAIRS[request.param], "draft_module": "tests.split.wiped_draft"}
    arm = Arm(start(SeparateEngine, separate, **how))
    yield Arms(name=request.param, separate=arm, colocated=Arm(start(InProcessEngine, colocated)))
    separate_of(arm).stop_draft()  # its memory is needed for the next pair's
