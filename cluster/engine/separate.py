"""A target in this process and its draft in another (placement `separate`)."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cluster.channel.base import ChannelKind
from cluster.channel.faults import FaultsConfig
from cluster.contract.codec import to_plain
from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.facts import Role
from cluster.contract.policy import Policy
from cluster.control.refusals import to_error, to_refusal
from cluster.control.settings import DEFAULT_START_TIMEOUT_S, CoordinatorSettings, MemberSettings
from cluster.control.supervisor import SupervisedProcess
from cluster.engine.in_process import InProcessEngine
from cluster.engine.pair import beside_draft, draft_engine_args, target_engine_args
from cluster.engine.settings import EngineSettings
from cluster.engine.tracing import await_trace
from cluster.errors import UserError
from cluster.speculation.settings import DEFAULT_ROUND_DEADLINE_S, RemoteDraftSettings

DEFAULT_POLICY: Final = Policy()
ROLES: Final[tuple[Role, ...]] = ("target", "draft")

COORDINATOR_MODULE: Final = "cluster.control.coordinator_process"
DRAFT_MODULE: Final = "cluster.speculation.draft_process"

DRAFT_STOP_TIMEOUT_S: Final = 15.0
"""For a process whose target has gone. It has nothing to save, but takes 3 s to unload vLLM, longer on a busy host."""

COORDINATOR_STOP_TIMEOUT_S: Final = 5.0


class SeparateEngine(InProcessEngine):
    """As InProcessEngine, with two processes started before it and ended after it: the draft's, and the coordinator
    through which the two sides agree on their KV contract. One that ends is started again."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        policy: Policy = DEFAULT_POLICY,
        channel: ChannelKind = "shm",
        round_deadline_s: float = DEFAULT_ROUND_DEADLINE_S,
        stall_limit_s: float | None = None,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        draft_module: str = DRAFT_MODULE,
        draft_environment: Mapping[str, str] | None = None,
        draft_trace: Path | None = None,
        faults: FaultsConfig | None = None,
    ) -> None:
        """`start_timeout_s` is for each thing that one side waits for on the other until they serve, such as to load
        its weights; `stall_limit_s` and `faults` are as in RemoteDraftSettings. `draft_module` is what the draft's
        process runs; tests have one that misbehaves. `draft_environment` goes over this process's, for the GPUs that
        it sees: without it the draft is on its target's. `draft_trace` is where the draft leaves a trace of its rounds
        when it ends.

        Raises:
            UserError: the pair can't be started. ContractError is one: neither side has allocated its KV cache then.
        """
        if settings.speculation is None:
            raise UserError("placement separate", "there is no draft to separate", "name one with --draft")
        is_beside = not draft_environment
        if is_beside:
            settings = beside_draft(settings)
        self._folder = Path(tempfile.mkdtemp(prefix="dspark-pair-"))
        address = f"unix:{self._folder / 'coordinator'}"
        coordinator = CoordinatorSettings(address=address, policy=policy)
        self._coordinator = SupervisedProcess("coordinator", COORDINATOR_MODULE, to_plain(coordinator))
        target, draft = (
            MemberSettings(address=address, role=role, name=role, start_timeout_s=start_timeout_s) for role in ROLES
        )
        self._draft_trace = draft_trace
        draft_settings = {
            "member": to_plain(draft),
            "engine_args": draft_engine_args(settings, policy, beside_target=is_beside),
            "trace": None if draft_trace is None else str(draft_trace),
            "faults": to_plain(faults),
        }
        self._draft = SupervisedProcess("draft", draft_module, draft_settings, draft_environment)
        remote = RemoteDraftSettings(
            member=target,
            channel=channel,
            round_deadline_s=round_deadline_s,
            stall_limit_s=stall_limit_s,
            faults=faults,
        )
        try:
            arguments = target_engine_args(settings, remote)
            # From here on the coordinator knows of both, and tells either of the other's end.
            self._coordinator.await_start()
            self._draft.await_start()
            super().__init__(settings, more_engine_args=arguments)
        except ContractViolation as violation:
            self._abandon()
            raise to_error(to_refusal(violation, "target")) from violation
        except BaseException:
            self._abandon()
            raise
        # vLLM takes it from its worker when the engine closes.
        self._speculator = self.vllm_engine.model_executor.driver_worker.worker.model_runner.speculator

    def close(self) -> None:
        self.stop_draft()
        super().close()
        self._coordinator.stop(COORDINATOR_STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop_draft(self) -> None:
        """End the draft's process; the target goes on without proposals. A second call does nothing."""
        self._draft.let_end()
        self._speculator.close()
        if self._draft_trace is not None:  # it writes it now, and then its process may end
            await_trace(self._draft_trace, DRAFT_STOP_TIMEOUT_S)
        self._draft.stop(DRAFT_STOP_TIMEOUT_S)

    @property
    def contract(self) -> KVContract:
        """Under which the pair runs."""
        target_worker: Any = self.vllm_engine.model_executor.driver_worker.worker  # ours
        contract: KVContract = target_worker.contract
        return contract

    @property
    def draft_process(self) -> subprocess.Popen[bytes]:
        """The one that there is now; it may be another later."""
        return self._draft.popen

    @property
    def coordinator_process(self) -> subprocess.Popen[bytes]:
        """Likewise."""
        return self._coordinator.popen

    @property
    def speculator(self) -> Any:
        """The RemoteSpeculator: its `times`, and why it is `lost`."""
        return self._speculator

    def _abandon(self) -> None:
        """The engine didn't start. A draft that knows why has said so."""
        self._coordinator.stop(COORDINATOR_STOP_TIMEOUT_S)
        self._draft.stop(DRAFT_STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
