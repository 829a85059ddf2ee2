"""What processes have of the machine, and how much more than before."""

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import DIRECTORY, segments_of

_MAPPED: Final = re.compile(rf" {DIRECTORY}/(dspark-\S+)")
"""A channel's segment loses its name when both sides have opened it; who maps it still shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`memory` is resident, in bytes."""

    memory: int
    descriptors: int
    segments: int

    @classmethod
    def of(cls, pids: Sequence[int]) -> Self:
        folders = [Path(f"/proc/{pid}") for pid in pids]
        pages = sum(int((folder / "statm").read_text().split()[1]) for folder in folders)
        mapped = {name for folder in folders for name in _MAPPED.findall((folder / "maps").read_text())}
        named = {path.name for path in segments_of(list(map(ProcessIdentity.of, pids)))}
        return cls(
            memory=pages * mmap.PAGESIZE,
            descriptors=sum(len(list((folder / "fd").iterdir())) for folder in folders),
            segments=len(mapped | named),
        )

    def growth_since(self, before: Self) -> dict[str, float]:
        """The share that came on, of each."""
        return {
            "memory": _growth(before.memory, self.memory),
            "descriptors": _growth(before.descriptors, self.descriptors),
            "segments": _growth(before.segments, self.segments),
        }


def _growth(before: int, now: int) -> float:
    return (now - before) / max(1, before)
