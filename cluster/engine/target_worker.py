"""The worker of a target whose draft is in another process.

EngineArgs(worker_cls="cluster.engine.target_worker.TargetWorker",
           additional_config=RemoteDraftSettings(...).to_additional_config(), ...)
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from dspark.v1.control_pb2 import EngineSizes, SharedKV, SharedLayer
from vllm.v1.outputs import AsyncModelRunnerOutput

from cluster.channel import ChannelError
from cluster.channel.base import ChannelKind
from cluster.channel.cuda_exported import ExportedAllocation
from cluster.channel.exported import ExportedMemory
from cluster.contract.facts import KVSharing, Role
from cluster.contract.observe import Observed
from cluster.contract.read_side import BuiltSide, pairing_of
from cluster.contract.vllm_names import alloc_conf_from_env, resolve_kv_cache_layout
from cluster.control.member import Member
from cluster.control.refusals import ControlError
from cluster.engine import draft_context
from cluster.engine.contract_worker import ContractWorker
from cluster.engine.draft_context import DraftReport
from cluster.engine.kv_pool import PoolAllocator, require_exportable
from cluster.engine.version import vllm_release
from cluster.speculation.messages import MessageError
from cluster.speculation.settings import remote_draft_settings

if TYPE_CHECKING:
    from cluster.speculation.remote import PairedDraft, RemoteSpeculator
    from cluster.speculation.target_seam import DraftlessSpeculator

_KV_EXPORTS: Final[Mapping[ChannelKind, tuple[KVSharing, ...]]] = {
    "shm": ("map", "mirror"),
    "gloo": ("mirror",),
    "cuda_ipc": ("map",),
    "nccl": ("mirror",),
}
"""How a draft at the other end of each channel can read the target's KV."""


class TargetWorker(ContractWorker):
    """Joins before it loads, so that its draft loads at the same time; opens the rounds once both have allocated.

    Of several tensor-parallel ranks only the first has a draft; the others verify what it got from there.
    """

    role: ClassVar[Role] = "target"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_epoch = 0
        self._exported: ExportedMemory | ExportedAllocation | None = None
        self._has_draft = self.rank == 0
        if self._has_draft:
            self.take_part(self._join())

    def built_side(self, specs: Mapping[str, Any], observed: Observed) -> BuiltSide:
        exports = self._kv_exports()
        if self.vllm_config.speculative_config.use_gemma4_mtp() and self.device.type == "cuda" and "map" in exports:
            require_exportable(
                sleep_mode=self.model_config.enable_cumem_allocator, allocator_settings=alloc_conf_from_env()
            )
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
            kv_exports=exports,
        )

    def round_report(self) -> dict[str, Any] | None:
        """A RoundReport as plain values, which vLLM carries between its processes; None where there is no draft."""
        return asdict(self._speculator.report) if self._has_draft else None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if not self._has_draft:
            return
        with self.member.reporting():
            if self.contract.kv_sharing is not None:
                self._speculator.share_kv(self.contract, self._shared_kv())
            self._speculator.begin(self._speculator.open_rounds(self.member, self.contract))
        self._speculator.keep_paired(self._pair_again)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._has_draft:
            self._speculator.follow(draft_context.asked_epoch(scheduler_output))
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if not self._has_draft:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _Reporting(output, self._draft_report())
        draft_context.report(output, self._draft_report())
        return output

    @property
    def _speculator(self) -> "RemoteSpeculator":
        speculator: RemoteSpeculator = self.model_runner.speculator
        return speculator

    def _draft_report(self) -> DraftReport:
        speculator = self._speculator
        return DraftReport(epoch=speculator.draft_epoch, asked=speculator.asked, round_s=speculator.last_round_s)

    def _join(self) -> Member:
        settings = remote_draft_settings(self.vllm_config.additional_config)
        sizes = EngineSizes(
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_model_len=self.model_config.max_model_len,
        )
        return Member(settings.member, vllm_version=vllm_release(), engine_sizes=sizes, last_epoch=self._last_epoch)

    def _pair_again(self) -> "PairedDraft":
        """In the speculator's thread, while this worker goes on alone."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own
        self._last_epoch = max(self._last_epoch, self.member.epoch)
        self.member.close()
        member = self._join()
        self.pair_again(member)
        with member.reporting():
            draft = self._speculator.open_rounds(member, self.contract)
        with ExitStack() as held:
            held.callback(draft.rounds.close)
            try:
                draft.rounds.warm_up()
            except (ChannelError, MessageError) as error:
                remedy = "look at what its process wrote last"
                raise ControlError("the draft that came back", str(error), remedy) from error
            held.pop_all()
        return draft

    def shutdown(self) -> None:
        # There is none before the model's runner is there, nor after a first shutdown.
        speculator: DraftlessSpeculator | None = getattr(self.model_runner, "speculator", None)
        if speculator is not None:
            speculator.close()
        super().shutdown()  # waits for the stream
        if speculator is not None:
            speculator.leave_ranks()
        if self._exported is not None:
            self._exported.close()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """vLLM asks for what to allocate in. A CPU's pool that the draft maps lies in shared memory from the start."""
        if tag == "kv_cache" and self.contract.kv_sharing == "map" and self.device.type == "cpu":
            return PoolAllocator(self._allocate_shared)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context

    def _kv_exports(self) -> tuple[KVSharing, ...]:
        channel = remote_draft_settings(self.vllm_config.additional_config).channel
        if self.device.type == "cuda" and channel == "shm":
            return ("mirror",)  # between GPUs of which one may not reach the other's memory
        return _KV_EXPORTS[channel]

    def _allocate_shared(self, num_bytes: int) -> torch.Tensor:
        self._exported = memory = ExportedMemory(num_bytes)
        return torch.frombuffer(memory.memory, dtype=torch.int8)

    def _shared_kv(self) -> SharedKV:
        """Where the layers of the groups that the draft reads lie, and what scales them."""
        groups = [group for group in self.contract.groups_of(self.role) if group.shared]
        layers = {name: self._layers[name] for group in groups for name in group.layers}
        if self.contract.kv_sharing == "map" and self.device.type == "cuda":
            self._exported = ExportedAllocation(next(iter(layers.values())).kv_cache)  # vLLM makes one for all layers
        exported, shared = self._exported, SharedKV()
        if exported is not None:
            shared.location, shared.num_bytes = exported.location, exported.num_bytes
        for name, layer in layers.items():
            if layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1:
                raise NotImplementedError(f"{name} has a scale for each head, and one for all is what travels")
            offset = 0 if exported is None else layer.kv_cache.data_ptr() - exported.address
            shared.layers.append(
                SharedLayer(name=name, offset=offset, k_scale=layer._k_scale_float, v_scale=layer._v_scale_float)
            )
        return shared


class _Reporting(AsyncModelRunnerOutput):
    """A model's output that isn't there yet, and what it is to report."""

    def __init__(self, output: Any, of_draft: DraftReport) -> None:
        self._output = output
        self._of_draft = of_draft

    def get_output(self) -> Any:
        output = self._output.get_output()
        draft_context.report(output, self._of_draft)
        return output
