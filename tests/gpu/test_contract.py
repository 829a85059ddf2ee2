"""What a pair agrees on where nobody has said it: the pools' size, and the draft's attention backend. Needs vLLM's CUDA
build and a GPU; takes two where there are two."""

from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from cluster.engine.settings import EngineSettings
from tests.gpu.engines import REQUESTS, Separate, TritonSettings, apart, run_arm, settings_of
from tests.split.arms import SplitSettings

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PAIR = "qwen3-dspark-agreeing"


class TritonTargetSettings(SplitSettings):
    """A target with a backend of its choice: vLLM lets the draft choose another, and that is FLASH_ATTN."""

    def to_engine_args(self) -> dict[str, Any]:
        return super().to_engine_args() | {"attention_config": {"backend": "TRITON_ATTN"}}


def contract_of(settings: EngineSettings, separate: Separate, connection: Connection) -> None:
    """Sends the contract, and the tokens of the first requests."""
    with separate.start(settings) as engine:
        tokens = [completion.token_ids for completion in engine.generate(REQUESTS[0])]
        connection.send((engine.contract, tokens))


def test_a_pair_that_is_given_no_size_has_the_targets_share(tmp_path_factory: pytest.TempPathFactory) -> None:
    sizes = {"kv_cache_bytes": None, "num_gpu_blocks": None, "gpu_memory_utilization": 0.1, "compilation_mode": 0}
    settings = settings_of(PAIR, tmp_path_factory.mktemp(PAIR), **sizes)
    contract, tokens = apart(contract_of, settings, Separate(channel="cuda_ipc"))
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.05 * total < contract.pool_bytes("target") < 0.1 * total
    assert all(tokens)


def test_a_draft_is_built_again_with_its_targets_backend(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(PAIR)
    settings = settings_of(PAIR, folder, TritonTargetSettings, compilation_mode=0)
    contract, _ = apart(contract_of, settings, Separate(channel="cuda_ipc"))
    assert {group.attention_backend for group in contract.groups} == {"TRITON_ATTN"}
    assert contract.deviations == ()
    both = settings_of(PAIR, folder, TritonSettings, compilation_mode=0)
    assert apart(run_arm, settings, Separate(channel="cuda_ipc"))[0] == apart(run_arm, both, None)[0]
