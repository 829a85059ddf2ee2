"""The driver half of the `cpu` backend: a device that is always there and never selected by itself."""

import time
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Tells Triton about the CPU as far as the interpreter needs it."""

    @classmethod
    def is_active(cls) -> bool:
        # Only a CPU build of torch may take it: Triton refuses to start with two active drivers, and a GPU
        # installation must not notice that this package is there.
        return torch.version.cuda is None and torch.version.hip is None

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise RuntimeError(f"the interpreter launches no C++ code, but was asked for the C++ type of {ty}")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def benchmark(kernel_call: Callable[[], object], *, quantiles: list[float], **_: Any) -> list[float]:
            start = time.perf_counter()
            kernel_call()
            return [(time.perf_counter() - start) * 1e3] * len(quantiles)

        return benchmark
