"""A cluster's processes, and what is left of them."""

import os
from collections.abc import Collection
from pathlib import Path

import ray

from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import DIRECTORY


def actors_processes() -> dict[str, ProcessIdentity]:
    """Of the actors in this process's Ray namespace, by their names."""
    return {name: ProcessIdentity.of(_process_of(name)) for name in ray.util.list_named_actors()}


def family(pid: int) -> set[ProcessIdentity]:
    """A process and all below it, as far as they live."""
    try:
        parent = {ProcessIdentity.of(pid)}
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return parent.union(*map(family, children))


def segments_of(processes: Collection[ProcessIdentity]) -> list[Path]:
    """The shared memory that they made and that is still there."""
    owners = [f".{process.pid}.{process.start_ticks}." for process in processes]
    return [path for path in DIRECTORY.glob("dspark-*") if any(owner in path.name for owner in owners)]


def _process_of(name: str) -> int:
    process: int = ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid()))
    return process


def _children(task: Path) -> list[str]:
    return (task / "children").read_text(encoding="ascii").split()
