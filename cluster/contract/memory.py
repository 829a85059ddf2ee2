"""What a pair takes of a GPU: the draft beside its target in one engine, or each on a GPU of its own.

Sizes follow from the facts and the contract; what activations and graphs take is given as `reserved_bytes`. Tokens are
counted as vLLM counts them (`get_kv_cache_capacity`): requests of `max_model_len` that fit, times that length. For the
one engine this is an upper bound: vLLM may pad the draft's pages to the target's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.facts import SideFacts
from cluster.contract.geometry import blocks_held

_GIB = 1 << 30


def binary_size(num_bytes: int) -> str:
    """Bytes for people: in GiB, or in MiB where that would be nearly none."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def parameter_bytes(parameters: Iterable[Any]) -> int:
    """Of torch's parameters. Tied weights are one parameter under two names, and one memory."""
    unique = {id(parameter): parameter for parameter in parameters}
    return sum(parameter.numel() * parameter.element_size() for parameter in unique.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes and tokens of KV on the target's GPU, with the draft on it and without."""

    target_weight_bytes: int
    draft_weight_bytes: int
    """In the target's engine: without what the two share there."""
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    colocated_tokens: int
    separate_tokens: int
    """What both pools of a separate pair can hold: they have one number of blocks."""
    draft_limits: bool
    """Whether it is the draft's GPU that limits it."""

    @property
    def tokens_gained(self) -> int:
        return self.separate_tokens - self.colocated_tokens

    @property
    def draft_kv_share(self) -> float:
        """Of the memory for KV, the part that the draft's takes in the target's engine."""
        both = self.target_kv_bytes_per_token + self.draft_kv_bytes_per_token
        return self.draft_kv_bytes_per_token / both

    def __str__(self) -> str:
        costs = (
            f"the draft costs the target {binary_size(self.draft_weight_bytes)} of weights and "
            f"{self.draft_kv_share * 100:.0f} % of its KV"
        )
        change = f"{abs(self.tokens_gained):,} tokens {'more' if self.tokens_gained >= 0 else 'fewer'} without it"
        limit = ", as many as the draft's GPU holds" if self.draft_limits else ""
        return f"{costs}: {change}{limit}"


def plan_memory(
    target: SideFacts,
    draft: SideFacts,
    contract: KVContract,
    *,
    gpu_bytes: int,
    draft_gpu_bytes: int | None = None,
    reserved_bytes: int = 0,
) -> MemoryPlan:
    """Plan for GPUs of which the engines may use `gpu_bytes` (and `draft_gpu_bytes`, if the draft's differs).

    A GPU that can't even hold the weights has 0 tokens.
    """
    length = target.max_model_len

    def held(group: GroupContract) -> int:
        return blocks_held(
            group.block_size,
            group.sliding_window,
            one_state=group.kind == "mamba",
            num_tokens=length,
            max_in_flight_tokens=target.max_in_flight_tokens,
        )

    blocks = sum({group.block_table: held(group) for group in contract.groups_of("target")}.values())
    target_request = blocks * contract.target.bytes_per_block
    draft_request = sum(held(group) * _block_bytes(group) for group in contract.groups_of("draft"))
    draft_in_target = draft.weight_bytes - draft.shared_weight_bytes

    def tokens(total: int, weights: int, request: int) -> int:
        return max(0, total - reserved_bytes - weights) * length // request

    alone = tokens(gpu_bytes, target.weight_bytes + draft.projection_bytes, target_request)
    mirrored = alone
    if contract.draft.bytes_per_block:
        # The draft's pool has a block for each id of the target's, on whatever table the target uses it.
        mirrored = tokens(draft_gpu_bytes or gpu_bytes, draft.weight_bytes, blocks * contract.draft.bytes_per_block)
    return MemoryPlan(
        target_weight_bytes=target.weight_bytes,
        draft_weight_bytes=draft_in_target,
        target_kv_bytes_per_token=target_request // length,
        draft_kv_bytes_per_token=draft_request // length,
        colocated_tokens=tokens(gpu_bytes, target.weight_bytes + draft_in_target, target_request + draft_request),
        separate_tokens=min(alone, mirrored),
        draft_limits=mirrored < alone,
    )


def _block_bytes(group: GroupContract) -> int:
    """One block of all layers of a group."""
    return len(group.layers) * group.page_size_bytes
