"""The channel decides how the bytes travel, not what they say."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from tests.split.arms import Arm, Arms, greedy, pair_settings, separate_of


def test_rounds_over_gloo(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = pair_settings("qwen3-dspark", tmp_path_factory.mktemp("gloo"))
    arms = Arms(
        name="qwen3-dspark",
        colocated=Arm(start(InProcessEngine, settings)),
        separate=Arm(start(SeparateEngine, settings, channel="gloo")),
    )
    arms.compare([greedy(range(7, 40), 10), greedy(range(60, 65), 20), greedy(range(80, 280), 14)])
    separate_of(arms.separate).stop_draft()
    assert separate_of(arms.separate).draft_process.returncode == 0
