"""vLLM may want fewer tokens in a round than the pair was set up for, or none; the draft takes in the states anyway."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import Arm, Arms, greedy, pair_settings

TOKENS_BY_REQUESTS = [(1, 1, 4), (2, 2, 2), (3, 4, 0)]


class DynamicSettings(EngineSettings):
    """As its base, with a number of tokens for each number of requests."""

    def to_engine_args(self) -> dict[str, Any]:
        arguments = super().to_engine_args()
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = TOKENS_BY_REQUESTS
        return arguments


def test_rounds_of_fewer_tokens_and_of_none(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = pair_settings("qwen3-dspark", tmp_path_factory.mktemp("dynamic"), num_gpu_blocks=16)
    settings = DynamicSettings(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    arms = Arms(
        name="qwen3-dspark",
        colocated=Arm(start(InProcessEngine, settings)),
        separate=Arm(start(SeparateEngine, settings)),
    )
    _, rounds = arms.compare([greedy(range(7, 40), 10), greedy(range(60, 65), 20), greedy(range(80, 140), 30)])
    assert {len(row.drafts) for one in rounds for row in one} == {4, 2, 0}
