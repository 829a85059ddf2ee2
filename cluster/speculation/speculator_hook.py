"""Where vLLM's model runner gets a speculator of ours: `init_speculator` (vLLM 0.32).

Runs in every process that loads vLLM's plugins, so it imports neither the model runner nor our speculator: the runner
takes the function over when it is itself imported, and our speculator is imported when an engine asks for it.
"""

import sys
from typing import Any, Final

from cluster.speculation.settings import REMOTE_DRAFT

_RUNNER: Final = "vllm.v1.worker.gpu.model_runner"


def install() -> None:
    """Give engines whose `additional_config` has REMOTE_DRAFT a RemoteSpeculator, all others vLLM's own.

    A second call changes nothing.
    """
    from vllm.v1.worker.gpu import spec_decode

    vllms_own = spec_decode.init_speculator
    if hasattr(vllms_own, "replaced"):
        return

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if REMOTE_DRAFT not in (vllm_config.additional_config or {}):
            return vllms_own(vllm_config, device, req_states)
        if vllm_config.parallel_config.rank > 0:
            from cluster.speculation.following import FollowingSpeculator

            return FollowingSpeculator(vllm_config, device)
        from cluster.speculation.remote import RemoteSpeculator

        return RemoteSpeculator(vllm_config, device)

    init_speculator.replaced = vllms_own  # type: ignore[attr-defined]
    spec_decode.init_speculator = init_speculator
    if (runner := sys.modules.get(_RUNNER)) is not None:
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]
