"""Every private name of vLLM 0.32 that the draft's side of the split uses.

vLLM's own worker and model runner hold the draft: the runner's model is a stub with what a draft may share of its
target, so its speculator is all that works there.
"""

from collections.abc import Mapping, Sequence
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
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from cluster.contract.contract import KVContract
from cluster.contract.facts import Role
from cluster.contract.observe import Observed, observe
from cluster.contract.read_side import BuiltSide, pairing_of
from cluster.control.member import Member
from cluster.engine.contract_worker import ContractWorker
from cluster.engine.vllm_errors import refused_settings
from cluster.speculation.checkpoint import load_parameters, read_tensors


class DraftWorker(ContractWorker):
    """vLLM's worker with the draft as its only model."""

    role: ClassVar[Role] = "draft"

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.use_aux_hidden_state_outputs = False  # of a target that isn't here
        stub = SharedWithDraft(self.vllm_config, self.device)
        with set_current_vllm_config(self.vllm_config), observe(self.vllm_config) as self._observed:
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
        )


class SharedWithDraft(nn.Module):
    """The target's embedding and head, which many drafts use as theirs: `model.embed_tokens` and `lm_head`."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__()
        config = vllm_config.model_config
        vocab_size, hidden_size = config.get_vocab_size(), config.get_hidden_size()
        self.model = nn.Module()
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(config.dtype), device:
            self.model.embed_tokens = VocabParallelEmbedding(
                vocab_size, hidden_size, quant_config=vllm_config.quant_config, prefix="model.embed_tokens"
            )
            self.lm_head = ParallelLMHead(
                vocab_size, hidden_size, quant_config=vllm_config.quant_config, prefix="lm_head"
            )
        folder = Path(config.model)
        tensors = read_tensors(folder, _shared_parameter)
        if config.hf_text_config.tie_word_embeddings:
            tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        load_parameters(self, tensors, checkpoint=folder)
        with set_current_vllm_config(vllm_config):
            process_weights_after_loading(self, config, device)


def start_executor(engine_args: dict[str, Any]) -> Any:
    """Build the config as the target does, load the draft in this process, allocate nothing yet."""
    arguments = engine_args | {"worker_cls": f"{__name__}.{DraftWorker.__name__}"}
    with refused_settings():
        return UniProcExecutor(EngineArgs(**arguments).create_engine_config())


def allocate(executor: Any, member: Member) -> KVContract:
    """Negotiate through `member`, and allocate the draft's KV pool of the contract: as vLLM's engine core does it."""
    config, worker = executor.vllm_config, executor.driver_worker.worker
    worker.take_part(member)
    register_all_kvcache_specs(config)
    specs = executor.get_kv_cache_specs()
    contract: KVContract = worker.contract
    layout = resolve_kv_cache_layout(
        config, executor.get_supported_kv_cache_layouts(), [spec for side in specs for spec in side.values()]
    )
    executor.set_kv_cache_layout(layout.name)
    config.cache_config.num_gpu_blocks_override = contract.num_blocks
    plans = get_kv_cache_configs(config, specs, [contract.pool_bytes("draft")])
    for plan in plans:
        plan.kv_cache_layout = config.cache_config.kv_cache_layout
    executor.initialize_from_config(plans)
    return contract


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
    num_tokens: int,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_scheduled_tokens: NDArray[np.int32],
    seq_lens_cpu_upper_bound: torch.Tensor,
) -> Any:
    """The part of a target's InputBatch that vLLM's DSpark and DFlash speculators read."""
    return SimpleNamespace(
        num_reqs=len(idx_mapping),
        num_tokens=num_tokens,
        idx_mapping=idx_mapping,
        positions=positions,
        query_start_loc=query_start_loc,
        num_scheduled_tokens=num_scheduled_tokens,
        seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound,
    )


def write_block_tables(runner: Any, rows: Sequence[torch.Tensor]) -> None:
    """Put the round's rows where the speculator, and a captured graph, read them; the rest is padding."""
    for table, new in zip(runner.block_tables.input_block_tables, rows, strict=True):
        table[: len(new)].copy_(new)
        table[len(new) :].zero_()


def _shared_parameter(stored: str) -> str | None:
    """Targets with other inputs have a prefix before `model` or after it; what else ends so is another table."""
    if stored.split(".")[-2:] == ["embed_tokens", "weight"]:
        return "model.embed_tokens.weight"
    return "lm_head.weight" if stored.split(".")[-2:] == ["lm_head", "weight"] else None
