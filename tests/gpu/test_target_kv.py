"""A draft in another process that reads its target's KV on a GPU, by map or by mirror, drafts as in the target's.
Needs vLLM's CUDA build and a GPU; maps the memory of a second one where there is one."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from cluster.channel.base import ChannelKind
from cluster.channel.cuda_exported import ExportedAllocation, map_allocation
from cluster.contract.facts import KVSharing
from cluster.contract.policy import Policy
from cluster.engine.in_process import InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from tests.split.arms import HYBRID_BLOCKS, Arm, SplitSettings, greedy, pair_settings, remote

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PAIR = "gemma4-mtp-agreeing"
START_TIMEOUT_S = 400.0
LONG, SHORT, MEDIUM = range(100, 290), range(7, 11), range(40, 60)
REQUESTS = [
    [greedy(range(7 + 20 * i, 10 + 20 * i), 9 + 5 * i % 12) for i in range(17)],
    [greedy(LONG, 10), greedy(SHORT, 14)],  # chunks
    [greedy(LONG, 12), greedy(MEDIUM, 60)],  # a cached prefix
    [greedy(range(start, start + 150), 70) for start in (5, 130, 255, 350)],  # a preemption
]

_REFUSED = """
import torch
from cluster.channel import ChannelUnavailable
from cluster.channel.cuda_exported import ExportedAllocation
try:
    ExportedAllocation(torch.zeros(64 << 20, dtype=torch.int8, device="cuda"))
except ChannelUnavailable as error:
    print(error)
"""


class EagerSettings(SplitSettings):
    def to_engine_args(self) -> dict[str, Any]:
        return super().to_engine_args() | {"enforce_eager": True}


def apart(function: Callable[..., None], *arguments: Any) -> Any:
    """What `function(*arguments, connection)` sends, in a process of its own: several engines in one fail on a GPU."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_TIMEOUT_S)
        return ours.recv()
    finally:
        process.join(60)
        process.kill()


def read_mapped(location: str, num_bytes: int, offset: int, device: int, connection: Connection) -> None:
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    pool = map_allocation(location, num_bytes, torch.device("cuda", device))
    connection.send((pool.numel(), pool[offset : offset + 1000].cpu()))


def run_arm(settings: EngineSettings, how: tuple[ChannelKind, KVSharing] | None, connection: Connection) -> None:
    if how is None:
        engine: InProcessEngine = InProcessEngine(settings)
    else:
        engine = SeparateEngine(settings, channel=how[0], policy=Policy(kv_sharing=how[1]))
    with engine:
        arm = Arm(engine)
        runs = [arm.run(requests) for requests in REQUESTS]
        connection.send((runs, None if how is None else remote(arm).lost))


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
    assert torch.equal(head, pool[:1000].cpu())
    assert not before.any()


def test_segments_that_grow_are_not_exported() -> None:
    settings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ended = subprocess.run([sys.executable, "-c", _REFUSED], env=settings, capture_output=True, text=True, timeout=120)
    assert "CUDA exports no handle" in ended.stdout, ended.stderr


@pytest.fixture(scope="module", params=[EagerSettings, SplitSettings], ids=["eager", "graphs"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    _, blocks = HYBRID_BLOCKS[PAIR]
    sizes = {"num_gpu_blocks": blocks, "kv_cache_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    small = pair_settings(PAIR, tmp_path_factory.mktemp(PAIR), **sizes)
    kind: type[EngineSettings] = request.param
    return kind(**{field.name: getattr(small, field.name) for field in fields(small)})


@pytest.fixture(scope="module")
def colocated(settings: EngineSettings) -> Any:
    return apart(run_arm, settings, None)[0]


@pytest.mark.parametrize("how", [("cuda_ipc", "map"), ("shm", "mirror"), ("gloo", "mirror")])
def test_drafts_are_those_of_a_draft_in_the_targets_process(
    settings: EngineSettings, colocated: Any, how: tuple[ChannelKind, KVSharing]
) -> None:
    runs, lost = apart(run_arm, settings, how)
    assert lost is None
    assert runs == colocated
