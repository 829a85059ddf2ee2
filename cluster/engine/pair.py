"""What makes one engine's arguments those of a pair in two processes."""

from dataclasses import replace
from typing import Any, Final

from cluster.contract.policy import AUTO, INHERIT, Policy
from cluster.engine.cpu import profile
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.speculation.settings import RemoteDraftSettings

_SHARE_TO_START_WITH: Final = 0.01
"""vLLM refuses to start on a GPU with less than this free. What a draft takes is what its contract says, and the
target, which may load on the same GPU at the same moment, has a share of its own."""

DEFAULT_SHARE: Final = 0.92
"""Of a GPU's memory, for an engine that isn't told otherwise: vLLM's own."""

_SHARE_BESIDE_DRAFT: Final = 0.75
"""Of what both have, for a target that isn't told otherwise. Drafts are a small part of their targets."""

DRAFT_SHARE: Final = "draft_share"
"""Key of vLLM's `additional_config`: of its GPU's memory, for the weights and the KV cache of a draft."""

TARGET_WORKER: Final = "cluster.engine.target_worker.TargetWorker"


def target_engine_args(settings: EngineSettings, remote: RemoteDraftSettings) -> dict[str, Any]:
    """For the target's vLLM beside `settings.to_engine_args`: it asks that draft.

    Raises:
        UserError: the draft reads its target's KV, of which each of several ranks has a part.
    """
    speculation, size = settings.speculation, settings.tensor_parallel_size
    if speculation is not None and speculation.method == "mtp" and size > 1:
        raise UserError(
            f"tensor_parallel_size {size} with draft {speculation.draft.name}",
            "it reads its target's KV, of which each rank has a part, and it is in a process of its own on one GPU",
            "use tensor_parallel_size 1, or placement colocated",
        )
    return {"worker_cls": TARGET_WORKER, "additional_config": remote.to_additional_config()}


def beside_draft(settings: EngineSettings, of_gpu: float = 1.0) -> EngineSettings:
    """The target's on a GPU of which the part `of_gpu` is its and its draft's: vLLM's own share would leave nothing."""
    if profile.is_cpu_installation() or settings.gpu_memory_utilization is not None:
        return settings
    return replace(settings, gpu_memory_utilization=_SHARE_BESIDE_DRAFT * of_gpu)


def draft_engine_args(
    settings: EngineSettings, policy: Policy, *, of_gpu: float = 1.0, beside_target: bool = False
) -> dict[str, Any]:
    """The target's, with what the policy names for the draft: it is built before there is a contract. On one device,
    however many the target has.

    The draft may have the part `of_gpu` of its GPU's memory, less what vLLM leaves free; `beside_target`, what the
    target's share leaves of the part that is both's.
    """
    arguments = replace(settings, tensor_parallel_size=1).to_engine_args()
    named = {"attention_backend": policy.attention_backend, "kv_cache_dtype": policy.kv_cache_dtype}
    words = {field: word for field, word in named.items() if word not in (INHERIT, AUTO)}
    if not profile.is_cpu_installation():
        of_target = settings.gpu_memory_utilization or DEFAULT_SHARE
        share = max(0.0, of_gpu - of_target) if beside_target else of_target * of_gpu
        arguments["gpu_memory_utilization"] = _SHARE_TO_START_WITH
        arguments["additional_config"] = {DRAFT_SHARE: share}
    return arguments | {"speculative_config": arguments["speculative_config"] | words}
