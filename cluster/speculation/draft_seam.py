"""Every private name of vLLM 0.32 that the draft's side of the split uses.

vLLM's own worker and model runner hold the draft: the runner's model is a stub with what a draft may share of its
target, so its speculator is all that works there.
"""

import gc
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    kv_cache_groups_tp_replicas,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.workspace import lock_workspace, use_workspace_lane

from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.facts import Role
from cluster.contract.geometry import is_block_outermost
from cluster.contract.observe import Observed, observe
from cluster.contract.read_groups import retaining
from cluster.contract.read_side import BuiltSide, pairing_of
from cluster.control.member import Member
from cluster.engine.contract_worker import ContractWorker
from cluster.engine.kv_pool import PoolAllocator, without_memory
from cluster.engine.target_layers import stand_ins
from cluster.engine.vllm_errors import refused_settings
from cluster.speculation.checkpoint import DUMMY, borrowed_parts, fill_with_dummies, load_parameters, read_tensors
from cluster.speculation.draft_memory import kv_cache_bytes

log = logging.getLogger(__name__)


class DraftWorker(ContractWorker):
    """vLLM's worker with the draft as its only model."""

    role: ClassVar[Role] = "draft"

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.use_aux_hidden_state_outputs = False  # of a target that isn't here
        stub = LentToDraft(self.vllm_config, self.device)
        with set_current_vllm_config(self.vllm_config), observe(self.vllm_config) as self._observed:
            self._of_target = frozenset(stand_ins(self.vllm_config, self.device))
            self.model_runner.load_model(load_dummy_weights, model=stub)

    def built_side(self, specs: Mapping[str, Any], observed: Observed) -> BuiltSide:
        speculative, module = self.vllm_config.speculative_config, self.model_runner.speculator.model
        weights = tuple(module.parameters())
        of_target = {id(parameter) for parameter in self.model_runner.model.parameters()}
        return BuiltSide(
            role=self.role,
            model=speculative.draft_model_config.model,
            model_config=speculative.draft_model_config,
            vllm_config=self.vllm_config,
            pairing=pairing_of(speculative, self.role),
            module=module,
            specs=specs,
            selections=observed.selections,
            writes=observed.writes,
            weights=weights,
            borrowed=tuple(weight for weight in weights if id(weight) in of_target),
            of_target=self._of_target,
            kv_cache_bytes=kv_cache_bytes(self.vllm_config, self.device, weights),
        )

    def follow_contract(self) -> bool:
        """vLLM chooses a draft's attention backend for itself, and most drafts then inherit none that their target was
        given: one that can run with its target's is built again with that. One whose constructor has rewritten the
        config would do it again, and is refused."""
        named = {"attention_config.backend": set[str](), "cache_config.cache_dtype": set[str]()}
        for difference in self.differences():
            if difference.layer not in self._of_target:
                named[difference.field].add(difference.contracted)
        if not any(named.values()) or any(len(words) > 1 for words in named.values()):
            return False  # a draft has one of each, in all of its layers
        if any(named.get(write.field) for write in self._observed.writes):
            return False
        speculative = self.vllm_config.speculative_config
        for backend in named["attention_config.backend"]:
            speculative.attention_backend = AttentionBackendEnum[backend]
        for word in named["cache_config.cache_dtype"]:
            speculative.kv_cache_dtype = word
        said = ", ".join(sorted(word for words in named.values() for word in words))
        log.info("the draft is built again, as its contract has it: %s", said)
        self._forget_model()
        with refused_settings():
            self.load_model()
        return True

    def _forget_model(self) -> None:
        """So that its weights aren't there twice."""
        self.model_runner.speculator.model = self.model_runner.model = None
        self._observed = Observed()
        self.vllm_config.compilation_config.static_forward_context.clear()
        gc.collect()
        torch.accelerator.empty_cache()

    @property
    def groups_of_layers(self) -> tuple[GroupContract, ...]:
        return tuple(
            replace(group, layers=tuple(name for name in group.layers if name in self._layers))
            for group in self.contract.groups_of_draft_layers
        )

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self.contract.kv_sharing == "map":
            return PoolAllocator(without_memory)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context


class LentToDraft(nn.Module):
    """Of the target's `model.embed_tokens` and `lm_head`, those that the draft has none of its own of."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__()
        config = vllm_config.model_config
        vocab_size, hidden_size = config.get_vocab_size(), config.get_hidden_size()
        is_dummy = vllm_config.load_config.load_format == DUMMY
        # vLLM's dummy loader gives a draft whatever its model lacks of its own.
        lent = {"embed_tokens", "lm_head"} if is_dummy else _lent(vllm_config.speculative_config)
        self.model = nn.Module()
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(config.dtype), device:
            if "embed_tokens" in lent:
                self.model.embed_tokens = VocabParallelEmbedding(
                    vocab_size, hidden_size, quant_config=vllm_config.quant_config, prefix="model.embed_tokens"
                )
            if "lm_head" in lent:
                self.lm_head = ParallelLMHead(
                    vocab_size, hidden_size, quant_config=vllm_config.quant_config, prefix="lm_head"
                )
        if not lent:
            return
        if is_dummy:
            fill_with_dummies(self)
        else:
            self._load(config, lent)
        with set_current_vllm_config(vllm_config):
            process_weights_after_loading(self, config, device)

    def _load(self, config: Any, lent: set[str]) -> None:
        folder = Path(config.model)
        tensors = read_tensors(folder, _lendable)
        if config.hf_text_config.tie_word_embeddings:
            tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[-2] in lent}
        load_parameters(self, tensors, checkpoint=folder)


def start_executor(engine_args: dict[str, Any]) -> Any:
    """Build the config as the target does, load the draft in this process, allocate nothing yet."""
    arguments = engine_args | {"worker_cls": f"{__name__}.{DraftWorker.__name__}"}
    with refused_settings():
        return UniProcExecutor(EngineArgs(**arguments).create_engine_config())


def allocate(executor: Any, member: Member) -> KVContract:
    """Negotiate through `member`, and allocate the draft's KV pool of the contract: as vLLM's engine core does it."""
    config = executor.vllm_config
    draft_worker: DraftWorker = executor.driver_worker.worker
    draft_worker.take_part(member)
    register_all_kvcache_specs(config)
    specs = executor.get_kv_cache_specs()
    contract = draft_worker.contract
    layout = resolve_kv_cache_layout(
        config, executor.get_supported_kv_cache_layouts(), [spec for side in specs for spec in side.values()]
    )
    executor.set_kv_cache_layout(layout.name)
    config.cache_config.num_gpu_blocks_override = contract.num_blocks
    executor.initialize_from_config([_plan(config, contract, specs[0])])
    return contract


def _plan(config: Any, contract: KVContract, specs: Mapping[str, Any]) -> Any:
    """As `get_kv_cache_configs` has it, which also wants room for a request with blocks of its own in each group: here
    the blocks are the target's."""
    groups = get_kv_cache_groups(config, dict(retaining(config, specs)))
    # Where the target's pool is mapped, a plan for less of it than there is: its layers that are read.
    pool_bytes = contract.pool_bytes("draft") or contract.pool_bytes("target")
    plan = get_kv_cache_config_from_groups(config, groups, pool_bytes)
    plan.kv_tp_replicas = kv_cache_groups_tp_replicas(groups, 1, 1)
    plan.kv_cache_layout = config.cache_config.kv_cache_layout
    if contract.groups_of("draft"):
        _lay_apart(plan.kv_cache_tensors, contract)
    return plan


def _lay_apart(tensors: list[Any], contract: KVContract) -> None:
    """Groups on one block table of the target use the same ids at once. vLLM overlays its groups: there each block has
    one owner."""
    groups = {layer: group for group in contract.groups_of("draft") for layer in group.layers}
    outermost = is_block_outermost(contract.draft.layout)
    taken = Counter[str]()
    for tensor in tensors:
        group = groups[tensor.layers[0]]
        tensor.size, tensor.offset = contract.pool_bytes("draft"), taken[group.block_table]
        if outermost:
            tensor.block_stride = contract.draft.bytes_per_block
        taken[group.block_table] += len(tensor.layers) * (group.page_size_bytes if outermost else tensor.layer_stride)


def pair_again(executor: Any, member: Member) -> KVContract:
    """Another pairing of a draft that has its KV pool."""
    draft_worker: DraftWorker = executor.driver_worker.worker
    draft_worker.pair_again(member)
    return draft_worker.contract


def runner_of(executor: Any) -> Any:
    """The model runner, with `speculator`, `block_tables` and `kv_cache_config`."""
    return executor.driver_worker.worker.model_runner


def layers_by_group(runner: Any) -> list[list[str]]:
    """The layers of each KV-cache group, in the order of the block tables."""
    return [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]


def block_table_widths(runner: Any) -> list[int]:
    return [table.shape[1] for table in runner.block_tables.input_block_tables]


def input_batch(
    *,
    idx_mapping: torch.Tensor,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_start_loc_np: NDArray[np.int32],
    num_scheduled_tokens: NDArray[np.int32],
    seq_lens_cpu_upper_bound: torch.Tensor,
    decode_graph_eligible: bool,
    with_seq_lens: bool,
) -> Any:
    """The part of a target's InputBatch that vLLM's speculators read. Only some read `seq_lens`, which take several
    kernels."""
    num_tokens = len(positions)
    return SimpleNamespace(
        num_reqs=len(idx_mapping),
        num_tokens=num_tokens,
        num_tokens_after_padding=num_tokens,  # of the target's graphs; a draft's own dispatch pads as it needs
        idx_mapping=idx_mapping,
        input_ids=input_ids,
        positions=positions,
        query_start_loc=query_start_loc,
        query_start_loc_np=query_start_loc_np,
        seq_lens=(positions[query_start_loc[1:] - 1] + 1).to(torch.int32) if with_seq_lens else None,
        num_scheduled_tokens=num_scheduled_tokens,
        seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound,
        decode_graph_eligible=decode_graph_eligible,
    )


def attention(runner: Any, batch: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Attention metadata and slot mappings by layer for the batch as it is: the target's, on the draft's own pool.

    A full graph takes no metadata: it reads where the runner's own batches lie, padded as they are.
    """
    tables, pool, buffers = runner.block_tables, runner.kv_cache_config, runner.input_buffers
    buffers.query_start_loc[: batch.num_reqs + 1].copy_(batch.query_start_loc)
    buffers.query_start_loc[batch.num_reqs + 1 :].fill_(batch.num_tokens)
    buffers.seq_lens[: batch.num_reqs].copy_(batch.seq_lens)
    buffers.seq_lens[batch.num_reqs :].zero_()
    slot_mappings = tables.compute_slot_mappings(
        batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens
    )
    metadata = build_attn_metadata(
        attn_groups=runner.attn_groups,
        num_reqs=batch.num_reqs,
        num_tokens=batch.num_tokens,
        query_start_loc_gpu=batch.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
        max_query_len=int(batch.num_scheduled_tokens.max()),
        seq_lens=batch.seq_lens,
        max_seq_len=int(batch.seq_lens_cpu_upper_bound.max()),
        block_tables=[table[: batch.num_reqs] for table in tables.input_block_tables],
        slot_mappings=slot_mappings,
        kv_cache_config=pool,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
        positions=batch.positions,
    )
    return metadata, build_slot_mappings_by_layer(slot_mappings, pool)


def input_block_tables(runner: Any) -> list[torch.Tensor]:
    """Those of each group that speculators, and captured graphs, read: [R, W], a request's row in the batch's order."""
    tables: list[torch.Tensor] = runner.block_tables.input_block_tables
    return tables


def settle_block_tables(runner: Any, idx_mapping: torch.Tensor) -> None:
    """Once a round's rows are in the `input_block_tables`: put them where they are looked up by slot, and zero what
    pads them. Slots of requests that aren't in the round keep what they had, which none reads."""
    tables = runner.block_tables
    for by_slot, table in zip(tables.block_tables, tables.input_block_tables, strict=True):
        by_slot.gpu[idx_mapping] = table[: len(idx_mapping)]
        table[len(idx_mapping) :].zero_()


def lane(runner: Any) -> AbstractContextManager[None]:
    """What a draft of a target in this process would work in: its graphs keep views of that scratch memory."""
    workspace: AbstractContextManager[None] = use_workspace_lane(runner._draft_workspace_lane)
    return workspace


def capture(runner: Any) -> None:
    """The speculator's CUDA graphs. The runner's own `capture_model` would capture the stub, too."""
    vllm_config = runner.vllm_config
    if vllm_config.model_config.enforce_eager:
        return
    with set_current_vllm_config(vllm_config), freeze_gc_for_cudagraph_capture(), lane(runner), torch.inference_mode():
        runner.speculator.capture()
    lock_workspace()  # to grow it would free what the graphs point at


def _lent(speculation: Any) -> set[str]:
    """What vLLM's loaders take from the target."""
    draft = speculation.draft_model_config
    if speculation.uses_draft_model():
        return set()
    if speculation.use_gemma4_mtp():
        return {"embed_tokens"}  # its own, of its own width, is its head
    if speculation.use_dspark() and "Qwen3DSparkModel" not in draft.architectures:
        return {"embed_tokens", "lm_head"}  # such a draft gets the target's, even if it has its own
    return borrowed_parts(Path(draft.model))


def _lendable(stored: str) -> str | None:
    """Targets with other inputs have a prefix before `model` or after it; what else ends so is another table."""
    if stored.split(".")[-2:] == ["embed_tokens", "weight"]:
        return "model.embed_tokens.weight"
    return "lm_head.weight" if stored.split(".")[-2:] == ["lm_head", "weight"] else None
