"""vLLM's processes talk through shared memory, which one that is killed leaves behind: here it says whose it was.

Python's resource tracker would remove it, but is itself a process of the engine's, and Ray kills them together.
"""

from multiprocessing import shared_memory

from cluster.channel.segment import ENGINE, new_name


def install() -> None:
    """Give what this process creates from here on a name by which `remove_orphans` knows it."""
    shared_memory._make_filename = lambda: f"/{new_name(ENGINE)}"  # type: ignore[attr-defined]
