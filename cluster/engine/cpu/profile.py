"""The CPU profile: the environment in which vLLM's V2 model runner works without a GPU.

vLLM needs Triton for its V2 runner. Here Triton's interpreter runs the same kernels, so that a laptop and CI go
through the code that a GPU does. Three parts: the `cpu` entry among Triton's backends (`triton_backend`), this
module's environment, and the repairs and stand-in kernels that `install` puts in place. A GPU installation
takes none of it.
"""

import importlib.metadata
import os

# What a process needs before torch and vLLM are imported; a value that the user has set stays.
_DEFAULTS = {
    # GiB for the KV cache. vLLM would take a share of all memory and measure it by a warm-up pass.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Draft and target, or two tests, share the cores: a worker that spins at a barrier starves the others, and a
    # forward pass of 60 ms was seen to take 700 ms.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def is_cpu_installation() -> bool:
    """Whether the installed vLLM is the CPU build (the distribution `vllm-cpu`)."""
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def activate() -> None:
    """Set this process's environment for the CPU, if the installation is a CPU one.

    Call it before torch is imported, which reads some of it only once. Child processes inherit it.
    """
    if not is_cpu_installation():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def install() -> None:
    """Repair Triton's interpreter and put the stand-in kernels in place, if the installation is a CPU one."""
    if not is_cpu_installation():
        return
    # These import triton and vllm, which a GPU process must not pay for and a CPU process not before `activate`.
    from cluster.engine.cpu import interpreter
    from cluster.engine.cpu.kernels import registry

    interpreter.repair()
    registry.install()
