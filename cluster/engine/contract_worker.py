"""vLLM's worker, held to a KV contract: it asks for one before anything is allocated, and allocates what it says.

    EngineArgs(worker_cls="cluster.engine.contract_worker.ContractWorker",
               additional_config={"contract": {"role": "target", "negotiator": "package.module.Class", ...}})

The barrier is where vLLM plans its KV cache. `get_kv_cache_spec` reports what this engine would allocate and waits for
the contract, under which its config is sealed. `initialize_from_config` compares the plan with the contract and waits
for the other side's; only then is memory taken, and compared again.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation, Writer
from cluster.contract.facts import ConfigWrite, Role, SideFacts
from cluster.contract.negotiator import Negotiator
from cluster.contract.observe import Observed, observe
from cluster.contract.phases import Phase
from cluster.contract.read_side import BuiltSide, Pairing, pairing_of, read_side
from cluster.contract.seal import Seal, covered, fixed_values
from cluster.contract.verify import verify_allocation, verify_plan
from cluster.engine.cpu import profile

if profile.is_cpu_installation():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

ADDITIONAL_CONFIG_KEY = "contract"


class ContractWorker(Worker):
    """Phases as in `Phase`; any failure before `initialize_from_config` calls vLLM's leaves no byte allocated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings: Mapping[str, Any] = self.vllm_config.additional_config[ADDITIONAL_CONFIG_KEY]
        self._role: Role = settings["role"]
        self._pairing = _pairing(self.vllm_config, settings)
        self._negotiator = _load(settings["negotiator"])(settings)
        self._observed = Observed()
        self._contract: KVContract | None = None
        self._seal: Seal | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with observe(self.vllm_config) as self._observed:
            super().load_model(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The specs, once the other side knows them: with the contract's block sizes."""
        specs = super().get_kv_cache_spec()
        contract = self._negotiator.agree(self._facts(specs))
        try:
            self._check_layers(contract)
        except ContractViolation as violation:
            self._negotiator.failed(violation)
            raise
        self._contract = contract
        sizes = {layer: group.block_size for group in contract.groups_of(self._role) for layer in group.layers}
        self.cache_config.block_size = min(sizes.values())
        self._seal = Seal(covered(self.vllm_config), fixed=fixed_values(contract, self._role))
        return {layer: replace(spec, block_size=sizes[layer]) for layer, spec in specs.items()}

    def determine_available_memory(self) -> int:
        """What the contract's blocks take: the engine core plans as many as fit what is told here."""
        available, needed = super().determine_available_memory(), self._held.pool_bytes(self._role)
        if self.cache_config.num_gpu_blocks_override is None and available < needed:
            violation = ContractViolation(
                "kv_cache_bytes", old=needed, new=available, reason="there is less memory than was reported"
            )
            self._negotiator.failed(violation)
            raise violation
        return needed

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        try:
            verify_plan(self._held, self._role, kv_cache_config)
            self._sealed.enter(Phase.ALLOCATING)
        except ContractViolation as violation:
            self._negotiator.failed(violation)
            raise
        self._negotiator.ready(self._held.digest)
        super().initialize_from_config(kv_cache_config)
        tensors = {layer: self._layers[layer].kv_cache for group in self._groups for layer in group.layers}
        verify_allocation(self._held, self._role, tensors, cache_dtype=self.cache_config.cache_dtype)
        self._sealed.enter(Phase.SERVING)

    def shutdown(self) -> None:
        if self._seal is not None:
            self._seal.enter(Phase.SHUTDOWN)
        super().shutdown()

    @property
    def contract(self) -> KVContract | None:
        """What this worker is held to, once it has asked."""
        return self._contract

    @property
    def _held(self) -> KVContract:
        assert self._contract is not None  # vLLM asks for the specs first
        return self._contract

    @property
    def _sealed(self) -> Seal:
        assert self._seal is not None  # with the contract
        return self._seal

    @property
    def _groups(self) -> tuple[Any, ...]:
        return self._held.groups_of(self._role)

    @property
    def _layers(self) -> dict[str, Any]:
        layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return layers

    def _facts(self, specs: Mapping[str, Any]) -> SideFacts:
        module = self.model_runner.get_model()
        return read_side(
            BuiltSide(
                role=self._role,
                model=self.model_config.model,
                model_config=self.model_config,
                vllm_config=self.vllm_config,
                pairing=self._pairing,
                module=module,
                specs=specs,
                selections=self._observed.selections,
                writes=self._observed.writes,
                weights=tuple(module.parameters()),
            )
        )

    def _check_layers(self, contract: KVContract) -> None:
        """The layers were built before there was a contract: each must be what it says."""
        for group in contract.groups_of(self._role):
            for name in group.layers:
                layer = self._layers[name]
                backend, word = layer.get_attn_backend().get_name(), getattr(layer, "kv_cache_dtype", None)
                self._check("attention_config.backend", name, group.attention_backend, backend)
                if word is not None:
                    self._check("cache_config.cache_dtype", name, group.cache_dtype, word)

    def _check(self, field: str, layer: str, contracted: str, built: str) -> None:
        if contracted == built:
            return
        write = next((write for write in self._observed.writes if write.field == field), None)
        raise ContractViolation(
            field,
            old=contracted,
            new=built,
            reason=f"{layer} was built with {built}, and the contract has {contracted}",
            writer=None if write is None else _writer(write),
        )


def _writer(write: ConfigWrite) -> Writer:
    return Writer(class_name=write.writer, function="its constructor", location=write.location)


def _pairing(vllm_config: Any, settings: Mapping[str, Any]) -> Pairing:
    """An engine of one model alone is told of the other by its settings."""
    if vllm_config.speculative_config is not None:
        return pairing_of(vllm_config.speculative_config, settings["role"])
    return Pairing(
        method=settings["method"],
        num_speculative_tokens=settings["num_speculative_tokens"],
        target_hidden_size=settings["target_hidden_size"],
    )


def _load(name: str) -> type[Negotiator]:
    module, _, qualname = name.rpartition(".")
    found: type[Negotiator] = getattr(importlib.import_module(module), qualname)
    return found
