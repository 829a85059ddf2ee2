"""Puts the stand-ins in the place of vLLM's kernels, through vLLM's own registry for other platforms' kernels."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from vllm.triton_utils import dispatcher
from vllm.v1.sample.ops import topk_topp_sampler

from cluster.engine.cpu.kernels import rejection, sampling

_SAMPLE = "vllm.v1.worker.gpu.sample"
_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"

STAND_INS: dict[str, Callable[..., None]] = {
    f"{_SAMPLE}.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{_SAMPLE}.gumbel._temperature_kernel": sampling.apply_temperature,
    f"{_SAMPLE}.min_p._min_p_kernel": sampling.apply_min_p,
    f"{_SAMPLE}.penalties._penalties_kernel": sampling.apply_penalties,
    f"{_SAMPLE}.logprob._topk_log_softmax_kernel": sampling.topk_log_softmax,
    f"{_SAMPLE}.logprob._ranks_kernel": sampling.ranks,
    "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": sampling.apply_grammar_bitmask,
    f"{_REJECTION}._compute_local_logits_stats_kernel": rejection.local_logits_stats,
    f"{_REJECTION}._compute_cumulative_log_p_kernel": rejection.compute_cumulative_log_p,
    f"{_REJECTION}._compute_local_residual_mass_kernel": rejection.compute_local_residual_mass,
    f"{_REJECTION}._rejection_kernel": rejection.reject,
    f"{_REJECTION}._resample_kernel": rejection.resample,
    f"{_REJECTION}._insert_resampled_kernel": rejection.insert_resampled,
}


def install() -> None:
    """Replace the kernels in this process; a second call changes nothing."""
    missing = {name: function for name, function in STAND_INS.items() if name not in dispatcher._registry}
    stand_ins = {name: by_parameter_name(name, function) for name, function in missing.items()}
    with warnings.catch_warnings():
        # vLLM looks at every attribute of every module to find copies of a kernel, deprecated ones too.
        warnings.simplefilter("ignore")
        dispatcher.register_kernels(stand_ins)
    # vLLM has its own torch version of top-k and top-p sampling and takes it where there is no Triton.
    topk_topp_sampler.HAS_TRITON = False


def by_parameter_name(kernel_name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Wrap `function` so that it takes a kernel's launch arguments and picks those it names.

    Raises TypeError when the kernel lacks a parameter that the function names: another vLLM version.
    """
    host, attribute = dispatcher._resolve_kernel(kernel_name)
    arguments: tuple[str, ...] = tuple(getattr(host, attribute).arg_names)
    plain = {name.removesuffix("_ptr").lower(): name for name in arguments}
    wanted = list(inspect.signature(function).parameters)
    if absent := [name for name in wanted if name not in plain]:
        raise TypeError(f"{kernel_name} has no parameter for {', '.join(absent)}: dspark-cluster needs vLLM 0.32.0")

    @functools.wraps(function)
    def launch(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(arguments, args, strict=False)) | kwargs
        function(**{name: given[plain[name]] for name in wanted})

    return launch
