"""What an engine that is killed leaves in /dev/shm, whoever comes next removes."""

import subprocess
import sys

from cluster.channel.segment import DIRECTORY, remove_orphans

CHILD = """
from multiprocessing import resource_tracker, shared_memory
from cluster.engine.shared_memory import install

resource_tracker.register = lambda *_: None  # it is killed, too
install()
print(shared_memory.SharedMemory(create=True, size=64).name, flush=True)
input()
"""


def test_memory_of_a_killed_engine_is_removed_and_of_a_living_one_is_not() -> None:
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        segment = DIRECTORY / engine.stdout.readline().strip()
        remove_orphans()
        assert segment.is_file()
        engine.kill()
        engine.wait()
    assert segment.is_file()
    of_ranks = DIRECTORY / f"{segment.name}-tp:0-[0-1]-cpushm_0"  # as vLLM names what it puts beside
    of_ranks.touch()
    remove_orphans()
    assert not segment.exists()
    assert not of_ranks.exists()
