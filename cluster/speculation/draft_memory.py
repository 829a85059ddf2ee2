"""What a draft's process may take of its GPU for a KV cache.

vLLM measures that by a run of the model in its largest batch. A draft has no such run before it has a contract: its
batches are its target's. So what a round works in is reckoned, and not found.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch

from cluster.contract.memory import parameter_bytes
from cluster.engine.pair import DRAFT_SHARE

_ROW_WIDTHS: Final = 16
"""Of a token, in hidden sizes: what a layer holds at once, with the wide ones between the halves of its MLP."""

_OTHER_BYTES: Final = 1 << 30
"""CUDA's context, its graphs, and the libraries' workspaces."""


def kv_cache_bytes(vllm_config: Any, device: torch.device, weights: Iterable[torch.nn.Parameter]) -> int | None:
    """What the draft's share of its GPU leaves beside its weights and a round; None where a number was asked for, or
    there is no GPU."""
    if device.type != "cuda" or vllm_config.cache_config.kv_cache_memory_bytes is not None:
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return left_of(total, vllm_config, weights)


def left_of(total: int, vllm_config: Any, weights: Iterable[torch.nn.Parameter]) -> int:
    """The same of a GPU with `total` bytes."""
    share: float = vllm_config.additional_config[DRAFT_SHARE]
    return max(0, int(total * share) - parameter_bytes(weights) - _round_bytes(vllm_config) - _OTHER_BYTES)


def _round_bytes(vllm_config: Any) -> int:
    """The rows of all tokens of the largest round, and the logits of all that is drafted in one."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    draft = speculative.draft_model_config
    element: int = draft.dtype.itemsize
    rows: int = scheduler.max_num_batched_tokens * draft.get_hidden_size() * _ROW_WIDTHS * element
    drafted: int = scheduler.max_num_seqs * speculative.num_speculative_tokens
    logits: int = drafted * draft.get_vocab_size() * (element + torch.float32.itemsize)
    return rows + logits
