"""Memory that one process exports and another one maps, and what keeps a target's KV pool from being exported."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from cluster.channel import ChannelUnavailable
from cluster.channel.cuda_exported import tensor_at
from cluster.channel.exported import ExportedMemory, MappedMemory
from cluster.engine.kv_pool import PoolAllocator, require_exportable, without_memory
from cluster.errors import UserError

_MAP = """
import sys
from cluster.channel.exported import MappedMemory
mapped = MappedMemory(sys.argv[1], int(sys.argv[2]))
print(bytes(mapped.memory[:4]), flush=True)
sys.stdin.readline()
print(bytes(mapped.memory[:4]), flush=True)
mapped.memory[0] = b"x"
print("written", flush=True)
"""


@pytest.fixture
def exported() -> Iterator[ExportedMemory]:
    memory = ExportedMemory(8192)
    yield memory
    memory.close()


def test_another_process_sees_each_write_and_can_make_none(exported: ExportedMemory) -> None:
    exported.memory[:4] = b"page"
    arguments = [sys.executable, "-c", _MAP, exported.location, "8192"]
    reader = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "b'page'\n"
    exported.memory[:4] = b"next"
    said, _ = reader.communicate("\n", timeout=60)
    assert said == "b'next'\n"
    assert reader.returncode < 0  # by a signal, at the write
    assert exported.memory[:4] == b"next"


def test_memory_that_is_gone_or_another_is_refused(exported: ExportedMemory) -> None:
    with pytest.raises(ChannelUnavailable, match="it has 8192 bytes, 4096 were announced"):
        MappedMemory(exported.location, 4096)
    exported.close()
    with pytest.raises(ChannelUnavailable, match="the target's KV pool"):
        MappedMemory(exported.location, 8192)
    with pytest.raises(ChannelUnavailable, match="is no location"):
        MappedMemory("elsewhere", 8192)


def test_a_tensor_over_memory_that_torch_does_not_own_is_that_memory() -> None:
    """As of a GPU's that another process exported."""
    owned = torch.arange(64, dtype=torch.uint8)
    seen = tensor_at(owned.data_ptr() + 8, 56, torch.device("cpu"))
    assert torch.equal(seen, owned[8:])
    owned.view(torch.float32)[3] = 1.5
    assert seen.view(torch.float32).as_strided((2,), (2,), 1).tolist()[0] == 1.5


def test_only_the_pool_of_an_allocation_is_replaced() -> None:
    sizes: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return without_memory(num_bytes)

    with PoolAllocator(allocate):
        pool = torch.zeros(64, dtype=torch.int8, device="cpu")
        other = torch.zeros(64, dtype=torch.float32)
    assert (pool.device.type, other.device.type, sizes) == ("meta", "cpu", [64])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sleep_mode": True, "allocator_settings": ""}, "enable_sleep_mode"),
        (
            {"sleep_mode": False, "allocator_settings": "max_split_size_mb:64, expandable_segments: True"},
            "expandable_segments:True",
        ),
        ({"sleep_mode": False, "allocator_settings": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
    ],
)
def test_an_allocator_that_exports_nothing_is_refused_with_the_remedy(settings: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=rf"{named}.*leave it out"):
        require_exportable(**settings)
    require_exportable(sleep_mode=False, allocator_settings="expandable_segments:False")
