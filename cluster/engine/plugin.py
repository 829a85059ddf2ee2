"""What vLLM runs of ours in every process it starts (entry point group `vllm.general_plugins`)."""


def register() -> None:
    """Install what this process's platform needs; called by vLLM, more than once in some processes."""
