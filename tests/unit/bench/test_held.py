"""What the bench of faults counts as growth."""

import os
from contextlib import closing

from cluster.bench.faults.held import Held
from cluster.channel.segment import SharedSegment, unlink

BYTES = 64 * 2**20


def test_memory_descriptors_and_segments_that_came_on_are_growth() -> None:
    before = Held.of([os.getpid()])
    kept = b"x" * BYTES
    reading, writing = os.pipe()
    with closing(SharedSegment.create(4096)) as segment:
        named = Held.of([os.getpid()])
        unlink(segment.name)
        mapped = Held.of([os.getpid()])
    os.close(reading)
    os.close(writing)
    assert mapped.memory - before.memory > len(kept) / 2
    assert mapped.descriptors == before.descriptors + 3, "the pipe's, and the segment's"
    assert named.segments == mapped.segments == before.segments + 1, "with its name, and without"
    assert Held.of([os.getpid()]).segments == before.segments
    assert mapped.growth_since(before)["descriptors"] == 3 / before.descriptors
