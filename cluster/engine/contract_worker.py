"""vLLM's worker, held to a KV contract: it asks for one before anything is allocated, and allocates what it says.

The barrier is where vLLM plans its KV cache. `get_kv_cache_spec` reports what this engine would allocate and waits for
the contract, under which its config is sealed. `initialize_from_config` compares the plan with the contract and waits
until the other side can keep it too; only then is memory taken, and compared again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.errors import ContractViolation, Writer
from cluster.contract.facts import ConfigWrite, Role, SideFacts
from cluster.contract.observe import Observed, observe
from cluster.contract.phases import Phase
from cluster.contract.read_side import BuiltSide, read_side
from cluster.contract.seal import Seal, covered, fixed_values
from cluster.contract.verify import verify_allocation, verify_plan
from cluster.control.member import Member
from cluster.engine.cpu import profile
from cluster.engine.rank_barrier import FirstRank, FurtherRank

if profile.is_cpu_installation():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class Difference(NamedTuple):
    """A layer that was built otherwise than contracted. `field` is the config's that decides it."""

    field: str
    layer: str
    contracted: str
    built: str


class ContractWorker(Worker):
    """Phases as in `Phase`; any failure before `initialize_from_config` calls vLLM's leaves no byte allocated.

    A subclass is one of the two sides: it says which parts of the engine are its model, and calls `take_part` before
    vLLM asks for the KV-cache specs.
    """

    role: ClassVar[Role]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.parallel_config.world_size > self.parallel_config.tensor_parallel_size:
            raise NotImplementedError("a contract is held by tensor-parallel ranks alone: all other parallelism is 1")
        self._observed = Observed()
        self._member: Member | None = None
        self._has_left = False
        self._rank: FirstRank | FurtherRank = FurtherRank()
        self._facts: SideFacts | None = None
        self._contract: KVContract | None = None
        self._seal: Seal | None = None

    def take_part(self, member: Member) -> None:
        """Negotiate through `member`, which this worker closes at its shutdown. For the first of an engine's ranks; the
        others follow it."""
        self._member = member
        self._rank = FirstRank(member)

    def pair_again(self, member: Member) -> None:
        """Come into another pairing through `member`, with what is allocated. From any thread.

        Raises:
            ContractError, ControlError: there is no peer that fits; the other side was told.
        """
        assert self._facts is not None  # of the first pairing
        self._member = member
        if self._has_left:  # meanwhile, through the member before
            member.close()
        with member.reporting():
            member.agree(self._facts, held=self.contract)
            member.accept(self.contract)
            member.ready(self.contract)

    def built_side(self, specs: Mapping[str, Any], observed: Observed) -> BuiltSide:
        """This side's model, once it is loaded."""
        raise NotImplementedError

    @property
    def member(self) -> Member:
        assert self._member is not None  # take_part
        return self._member

    @property
    def contract(self) -> KVContract:
        """What this worker is held to, once it has asked."""
        assert self._contract is not None  # vLLM asks for the specs first
        return self._contract

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with observe(self.vllm_config) as self._observed:
            super().load_model(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The specs, once the other side knows them: with the contract's block sizes."""
        specs = super().get_kv_cache_spec()
        with self._rank.reporting():
            self._facts, self._contract = self._rank.agree(read_side(self.built_side(specs, self._observed)))
            if self.follow_contract():
                specs = super().get_kv_cache_spec()
            self._check_layers()
        sizes = {layer: group.block_size for group in self.groups_of_layers for layer in group.layers}
        self.cache_config.block_size = min(sizes.values())
        self._seal = Seal(covered(self.vllm_config), fixed=fixed_values(self.contract, self.role))
        return {layer: replace(spec, block_size=sizes[layer]) for layer, spec in specs.items()}

    def follow_contract(self) -> bool:
        """Build layers again that the contract has otherwise than they are, if this side can; whether it did."""
        return False

    def measured_memory(self) -> int:
        """Bytes that vLLM's own profiling finds for the KV cache."""
        available: int = super().determine_available_memory()
        return available

    def determine_available_memory(self) -> int:
        """What the contract's blocks take: the engine core plans as many as fit what is told here."""
        return self.contract.pool_bytes(self.role)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        groups = self.contract.groups_of(self.role)  # none, where a draft has its target's KV only, and maps it
        with self._rank.reporting():
            if groups:
                verify_plan(self.contract, self.role, kv_cache_config)
            self._sealed.enter(Phase.ALLOCATING)
            self._rank.accept(self.contract)
        super().initialize_from_config(kv_cache_config)
        tensors = {layer: self._layers[layer].kv_cache for group in groups for layer in group.layers}
        with self._rank.reporting():
            if groups:
                verify_allocation(self.contract, self.role, tensors, cache_dtype=self.cache_config.cache_dtype)
            self._sealed.enter(Phase.SERVING)
            self._rank.ready(self.contract)

    def shutdown(self) -> None:
        if self._seal is not None:
            self._seal.enter(Phase.SHUTDOWN)
        self._has_left = True
        if self._member is not None:
            self._member.close()
        try:
            super().shutdown()
        finally:
            if self._seal is not None:
                self._seal.release()  # else it would hold the configs, and by them the layers and their KV cache

    @property
    def _sealed(self) -> Seal:
        assert self._seal is not None  # with the contract
        return self._seal

    @property
    def groups_of_layers(self) -> tuple[GroupContract, ...]:
        """The contract's groups with the layers that are in this process."""
        return self.contract.groups_of(self.role)

    @property
    def _layers(self) -> dict[str, Any]:
        layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return layers

    def differences(self) -> Iterator[Difference]:
        """In what this process's layers, which were built before there was a contract, aren't as it has them."""
        for group in self.groups_of_layers:
            for name in group.layers:
                layer = self._layers[name]
                backend, word = layer.get_attn_backend().get_name(), getattr(layer, "kv_cache_dtype", None)
                if backend != group.attention_backend:
                    yield Difference("attention_config.backend", name, group.attention_backend, backend)
                if word not in (None, group.cache_dtype):
                    yield Difference("cache_config.cache_dtype", name, group.cache_dtype, word)

    def _check_layers(self) -> None:
        for field, layer, contracted, built in self.differences():
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
