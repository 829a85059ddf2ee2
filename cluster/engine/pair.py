"""What makes one engine's arguments those of a pair in two processes."""

from typing import Any, Final

from cluster.contract.policy import AUTO, INHERIT, Policy
from cluster.engine.cpu import profile
from cluster.engine.settings import EngineSettings
from cluster.speculation.settings import RemoteDraftSettings

_SHARE_TO_START_WITH: Final = 0.01
"""vLLM refuses to start on a GPU with less than this free. What a draft takes is what its contract says, and the
target, which may load on the same GPU at the same moment, has a share of its own."""

TARGET_WORKER: Final = "cluster.engine.target_worker.TargetWorker"


def target_engine_args(remote: RemoteDraftSettings) -> dict[str, Any]:
    """For the target's vLLM beside `EngineSettings.to_engine_args`: it asks that draft."""
    return {"worker_cls": TARGET_WORKER, "additional_config": remote.to_additional_config()}


def draft_engine_args(settings: EngineSettings, policy: Policy) -> dict[str, Any]:
    """The target's, with what the policy names for the draft: it is built before there is a contract."""
    arguments = settings.to_engine_args()
    named = {"attention_backend": policy.attention_backend, "kv_cache_dtype": policy.kv_cache_dtype}
    words = {field: word for field, word in named.items() if word not in (INHERIT, AUTO)}
    if not profile.is_cpu_installation():
        arguments["gpu_memory_utilization"] = _SHARE_TO_START_WITH
    return arguments | {"speculative_config": arguments["speculative_config"] | words}
