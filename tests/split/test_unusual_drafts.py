"""Drafts that don't fit their target's ways: layers of two kinds, a shorter context, a cache dtype of their own."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import DRAFT_MODULE, SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import SIZES, Arm, SplitSettings, greedy, pair_settings, remote, separate_of
from tests.split.bounded_draft import CONTEXT

Start = Callable[..., Any]

REQUESTS = [greedy(range(7 + 20 * i, 10 + 20 * i), 30 + i) for i in range(3)] + [greedy(range(100, 190), 40)]
ROOM = 200
"""Blocks, for all of them in each of a colocated hybrid's groups."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("hybrid")
    return pair_settings("qwen3-dflash-hybrid-agreeing", folder, num_gpu_blocks=ROOM)


@pytest.fixture(scope="module")
def colocated(start: Start, hybrid: EngineSettings) -> Any:
    return Arm(start(InProcessEngine, hybrid)).run(REQUESTS)


@pytest.mark.parametrize("draft_module", [DRAFT_MODULE, "tests.split.rebuilt_draft"], ids=["as built", "built again"])
def test_layers_of_two_kinds_lie_side_by_side_on_one_table_of_the_target(
    start: Start, hybrid: EngineSettings, colocated: Any, draft_module: str
) -> None:
    arm = Arm(start(SeparateEngine, hybrid, draft_module=draft_module))
    full, window = arm.contract.groups_of("draft")
    assert full.block_table == window.block_table
    assert arm.contract.draft.bytes_per_block == full.page_size_bytes + window.page_size_bytes
    completions, rounds = arm.run(REQUESTS)
    assert remote(arm).lost is None
    assert (completions, rounds) == colocated
    assert {length for each in completions for length in each.accepted_by_round} > {0, 4}
    separate_of(arm).stop_draft()


def test_a_request_that_is_longer_than_the_drafts_context_goes_on(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its later positions are past the end of the draft's table of embeddings."""
    folder = tmp_path_factory.mktemp("short")
    settings = pair_settings("qwen3-dspark-agreeing", folder, num_gpu_blocks=ROOM)
    config = json.loads((folder / "draft" / "config.json").read_text())
    (folder / "draft" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    alone = EngineSettings(target=settings.target, **SIZES | {"num_gpu_blocks": ROOM})
    plain = start(InProcessEngine, alone).generate(REQUESTS)
    arm = Arm(start(SeparateEngine, settings, draft_module="tests.split.bounded_draft"))
    assert arm.contract.draft.max_model_len == CONTEXT
    completions, _ = arm.run(REQUESTS)
    assert remote(arm).report.losses == 0
    assert [each.token_ids for each in completions] == [each.token_ids for each in plain]
    assert sum(completions[0].accepted_by_round) > 0
    separate_of(arm).stop_draft()


class OtherDtypeSettings(SplitSettings):
    """A draft that is built with the model's dtype in its cache, whatever its target has."""

    def to_engine_args(self) -> dict[str, Any]:
        arguments = super().to_engine_args()
        arguments["speculative_config"]["kv_cache_dtype"] = "auto"
        return arguments


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="a CPU's FP8 cache takes AVX-512")
def test_a_draft_follows_its_targets_cache_dtype_by_being_built_again(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fp8")
    both = pair_settings("qwen3-dspark-agreeing", folder, num_gpu_blocks=ROOM, kv_cache_dtype="fp8")
    expected = Arm(start(InProcessEngine, both)).run(REQUESTS)
    other = OtherDtypeSettings(**{each.name: getattr(both, each.name) for each in fields(both)})
    arm = Arm(start(SeparateEngine, other))
    assert {group.cache_dtype for group in arm.contract.groups} == {"fp8"}
    assert arm.contract.deviations == ()
    assert arm.run(REQUESTS) == expected
    separate_of(arm).stop_draft()
