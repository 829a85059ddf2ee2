"""A cluster's processes."""

import os
from pathlib import Path

import ray

from cluster.channel.process import ProcessIdentity


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


def _process_of(name: str) -> int:
    process: int = ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid()))
    return process


def _children(task: Path) -> list[str]:
    return (task / "children").read_text(encoding="ascii").split()
