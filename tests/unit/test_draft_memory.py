"""What a draft may take of its GPU's memory: there is none here, so sizes are given."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.config import PoolConfig, PoolsConfig
from cluster.contract.policy import Policy
from cluster.engine.cpu import profile
from cluster.engine.pair import DRAFT_SHARE, beside_draft, draft_engine_args
from cluster.speculation.draft_memory import left_of
from tests.split.arms import pair_settings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("of_target", "of_gpu", "beside_target", "share"),
    [
        (0.8, 1.0, False, 0.8),  # a GPU of its own: as much as the target has of its
        (None, 1.0, False, 0.92),
        (0.8, 0.5, False, 0.4),  # two drafts on one
        (0.75, 1.0, True, 0.25),  # what the target leaves
        (0.3, 0.5, True, 0.2),  # of half a GPU: another pair has the other half
        (0.9, 0.5, True, 0.0),
    ],
)
def test_a_drafts_share(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_target: float | None,
    of_gpu: float,
    beside_target: bool,
    share: float,
) -> None:
    settings = replace(pair_settings("qwen3-dspark", tmp_path), gpu_memory_utilization=of_target)
    monkeypatch.setattr(profile, "is_cpu_installation", lambda: False)
    arguments = draft_engine_args(settings, Policy(), of_gpu=of_gpu, beside_target=beside_target)
    assert arguments["additional_config"][DRAFT_SHARE] == pytest.approx(share)
    assert arguments["gpu_memory_utilization"] == 0.01  # to start beside anything


@pytest.mark.parametrize(
    ("of_target", "of_draft", "both"),
    [(None, None, None), (1.0, 1.0, None), (2.0, 0.5, None), (0.0, 0.0, None), (0.5, 0.5, 1.0), (0.25, 0.25, 0.5)],
)
def test_a_part_of_a_gpu_is_shared(of_target: float | None, of_draft: float | None, both: float | None) -> None:
    pools = PoolsConfig(target=PoolConfig(num_gpus=of_target), draft=PoolConfig(num_gpus=of_draft))
    assert pools.shared_gpu == both


def test_a_target_beside_its_draft_leaves_it_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pair_settings("qwen3-dspark", tmp_path)
    assert beside_draft(settings) == settings  # a CPU's KV cache has a size of its own
    monkeypatch.setattr(profile, "is_cpu_installation", lambda: False)
    assert beside_draft(settings).gpu_memory_utilization == 0.75
    assert beside_draft(settings, 0.5).gpu_memory_utilization == 0.375
    told = replace(settings, gpu_memory_utilization=0.6)
    assert beside_draft(told) == told


def config(share: float, *, requests: int = 64) -> Any:
    """Qwen3-8B's draft in rounds of 8,192 tokens."""
    draft = SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 4096, get_vocab_size=lambda: 151_936)
    return SimpleNamespace(
        additional_config={DRAFT_SHARE: share},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=requests),
        speculative_config=SimpleNamespace(draft_model_config=draft, num_speculative_tokens=7),
    )


def test_a_drafts_kv_cache_is_what_weights_and_rounds_leave() -> None:
    weights = [torch.nn.Parameter(torch.empty(GIB, dtype=torch.int8, device="meta"), requires_grad=False)] * 2
    left = left_of(140 * GIB, config(0.25), weights)  # tied: 1 GiB
    assert 30 * GIB < left < 34 * GIB
    assert left_of(140 * GIB, config(0.25, requests=256), weights) < left - GIB
    assert left_of(140 * GIB, config(0.01), weights) == 0
