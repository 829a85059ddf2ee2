"""A GPU installation is as if the CPU profile weren't there. Needs vLLM's CUDA build and a GPU."""

import os

import pytest

from cluster.engine.cpu import profile

pytestmark = pytest.mark.gpu

if profile.is_cpu_installation():
    pytest.skip("this is the CPU installation", allow_module_level=True)


def test_kernels_are_compiled_by_vllm_own_triton_and_none_has_a_stand_in() -> None:
    import triton
    from triton.runtime.jit import JITFunction
    from vllm.plugins import load_general_plugins
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.gpu.sample import gumbel

    profile.activate()
    load_general_plugins()
    assert HAS_TRITON
    assert "TRITON_INTERPRET" not in os.environ
    assert "OMP_WAIT_POLICY" not in os.environ
    assert isinstance(gumbel._gumbel_sample_kernel, JITFunction)
    assert triton.runtime.driver.active.get_current_target().backend == "cuda"
