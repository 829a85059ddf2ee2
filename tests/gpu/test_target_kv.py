"""A draft in another process that reads its target's KV on a GPU, by map or by mirror, drafts as in the target's.
Needs vLLM's CUDA build and a GPU; maps the memory of a second one where there is one."""

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from cluster.channel.base import ChannelKind
from cluster.channel.cuda_exported import ExportedAllocation, map_allocation
from cluster.contract.facts import KVSharing
from cluster.contract.policy import Policy
from cluster.engine.settings import EngineSettings
from tests.gpu.engines import EagerTritonSettings, Separate, TritonSettings, apart, run_arm, settings_of

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PAIR = "gemma4-mtp-agreeing"
_REFUSED = """
import torch
from cluster.channel import ChannelUnavailable
from cluster.channel.cuda_exported import ExportedAllocation
try:
    ExportedAllocation(torch.zeros(64 << 20, dtype=torch.int8, device="cuda"))
except ChannelUnavailable as error:
    print(error)
"""


def read_mapped(location: str, num_bytes: int, offset: int, device: int, connection: Connection) -> None:
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    pool = map_allocation(location, num_bytes, torch.device("cuda", device))
    connection.send((pool.numel(), pool[offset : offset + 1000].tolist()))


@pytest.mark.parametrize("device", range(min(2, torch.cuda.device_count())))
def test_another_process_reads_a_tensor_where_it_lies(device: int) -> None:
    before = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")  # in the same segment of torch's
    pool = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
    pool[:1000] = torch.arange(1000, device="cuda") % 251
    torch.cuda.synchronize()
    exported = ExportedAllocation(pool)
    offset = pool.data_ptr() - exported.address
    num_bytes, head = apart(read_mapped, exported.location, exported.num_bytes, offset, device)
    assert num_bytes == exported.num_bytes >= offset + pool.numel()
    assert head == pool[:1000].tolist()
    assert not before.any()


def test_segments_that_grow_are_not_exported() -> None:
    settings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ended = subprocess.run([sys.executable, "-c", _REFUSED], env=settings, capture_output=True, text=True, timeout=120)
    assert "CUDA exports no handle" in ended.stdout, ended.stderr


@pytest.fixture(scope="module", params=[EagerTritonSettings, TritonSettings], ids=["eager", "graphs"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    return settings_of(PAIR, tmp_path_factory.mktemp(PAIR), request.param)


@pytest.fixture(scope="module")
def colocated(settings: EngineSettings) -> Any:
    return apart(run_arm, settings, None)[0]


@pytest.mark.parametrize(("channel", "sharing"), [("cuda_ipc", "map"), ("shm", "mirror"), ("gloo", "mirror")])
def test_drafts_are_those_of_a_draft_in_the_targets_process(
    settings: EngineSettings, colocated: Any, channel: ChannelKind, sharing: KVSharing
) -> None:
    runs, lost = apart(run_arm, settings, Separate(channel=channel, policy=Policy(kv_sharing=sharing)))
    assert lost is None
    assert runs == colocated
