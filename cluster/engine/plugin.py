"""What vLLM runs of ours in every process it starts (entry point group `vllm.general_plugins`)."""

from cluster.engine.cpu import profile


def register() -> None:
    """Install what this process's platform needs; vLLM may call it more than once in a process."""
    profile.install()
