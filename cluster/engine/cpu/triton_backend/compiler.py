"""The compiler half of the `cpu` backend; Triton's interpreter never calls it."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget

_NOT_COMPILED = (
    "Triton kernels are interpreted on a CPU, not compiled: set TRITON_INTERPRET=1 before vLLM is imported "
    "(cluster.engine.cpu.profile.activate does)"
)


class InterpretedBackend(BaseBackend):
    """Refuses to compile, and says how the kernels are meant to run."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "dspark-cluster-interpreted"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise RuntimeError(_NOT_COMPILED)

    def add_stages(self, stages: dict[str, Any], options: object, language: object) -> NoReturn:
        raise RuntimeError(_NOT_COMPILED)

    def load_dialects(self, context: object) -> NoReturn:
        raise RuntimeError(_NOT_COMPILED)

    def get_module_map(self) -> dict[str, Any]:
        return {}
