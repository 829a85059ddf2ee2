"""The worker of a target whose draft is in another process.

EngineArgs(worker_cls="cluster.engine.target_worker.TargetWorker",
           additional_config=RemoteDraftSettings(...).to_additional_config(), ...)
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from dspark.v1.control_pb2 import EngineSizes

from cluster.contract.facts import Role
from cluster.contract.observe import Observed
from cluster.contract.read_side import BuiltSide, pairing_of
from cluster.contract.vllm_names import resolve_kv_cache_layout
from cluster.control.member import Member
from cluster.engine.contract_worker import ContractWorker
from cluster.engine.version import vllm_release
from cluster.speculation.rounds import RoundReport
from cluster.speculation.settings import remote_draft_settings


class TargetWorker(ContractWorker):
    """Joins before it loads, so that its draft loads at the same time; opens the rounds once both have allocated."""

    role: ClassVar[Role] = "target"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = remote_draft_settings(self.vllm_config.additional_config)
        sizes = EngineSizes(
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_model_len=self.model_config.max_model_len,
        )
        self.take_part(Member(settings.member, vllm_version=vllm_release(), engine_sizes=sizes))

    def built_side(self, specs: Mapping[str, Any], observed: Observed) -> BuiltSide:
        module = self.model_runner.get_model()
        # Measured here, for the contract fixes the number of blocks before the engine core asks. A GPU's measurement
        # wants the layout that the core resolves next.
        resolve_kv_cache_layout(self.vllm_config, [self.get_supported_kv_cache_layouts()], specs.values())
        return BuiltSide(
            role=self.role,
            model=self.model_config.model,
            model_config=self.model_config,
            vllm_config=self.vllm_config,
            pairing=pairing_of(self.vllm_config.speculative_config, self.role),
            module=module,
            specs=specs,
            selections=observed.selections,
            writes=observed.writes,
            weights=tuple(module.parameters()),
            kv_cache_bytes=self.measured_memory(),
        )

    def round_report(self) -> dict[str, Any]:
        """A RoundReport as plain values, which vLLM carries between its processes."""
        speculator = self.model_runner.speculator
        return asdict(RoundReport(times=speculator.times, epoch=self.member.epoch, lost=speculator.lost is not None))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        with self.member.reporting():
            self.model_runner.speculator.open_rounds(self.member, self.contract)
