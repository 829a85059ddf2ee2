"""The gate of an engine's tensor-parallel ranks, with a stream for each of two. Needs a GPU."""

import time

import pytest
import torch

from cluster.channel.segment import DIRECTORY
from cluster.speculation.rank_gate import RankGate

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


def test_a_further_rank_s_stream_waits_for_the_first_one_s() -> None:
    torch.zeros(1, device="cuda")
    first = RankGate.first()
    further = RankGate.further(first.name)
    first.unlink()
    further.unlink()
    assert not (DIRECTORY / first.name).exists()
    ahead, behind = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        passed = torch.cuda.Event()
        with torch.cuda.stream(behind):
            further.enter()
            passed.record()
        time.sleep(0.05)
        assert not passed.query()
        with torch.cuda.stream(ahead):
            first.enter()
        passed.synchronize()
    with torch.cuda.stream(ahead):
        first.enter()
    with torch.cuda.stream(behind):
        further.enter()  # the gate is open already
    torch.cuda.synchronize()
