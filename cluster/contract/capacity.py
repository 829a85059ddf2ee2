"""How many blocks the two pools have: one number, because the draft's uses the target's block ids."""

from typing import Final

from cluster.contract.errors import ContractError
from cluster.contract.facts import SideFacts
from cluster.contract.policy import Policy

_NULL_BLOCK: Final = 1
"""vLLM's BlockPool never gives out its first block."""


def choose_num_blocks(
    target: SideFacts, draft: SideFacts, policy: Policy, *, target_bytes: int, draft_bytes: int, needed: int
) -> int:
    """The number that was asked for, if both sides can have it; else as many as the smaller side can hold.

    Args:
        target_bytes: bytes of one block over all layers of the target.
        draft_bytes: the same for the draft's own groups; 0 where it has none, and so no pool.
        needed: the target's blocks for one request of its `max_model_len`.

    Raises:
        ContractError: numbers that were asked for differ or don't fit, or the pools are too small for one request.
    """
    of_target = target.num_gpu_blocks_override or target.kv_cache_bytes // target_bytes
    of_draft = (draft.num_gpu_blocks_override or draft.kv_cache_bytes // draft_bytes) if draft_bytes else of_target
    asked = _asked(target, draft if draft_bytes else None, policy)
    num_blocks = asked or min(of_target, of_draft)
    if num_blocks > of_target or num_blocks > of_draft:
        raise ContractError(
            "num_gpu_blocks",
            target=f"at most {of_target}" if num_blocks > of_target else None,
            draft=f"at most {of_draft}" if num_blocks > of_draft else None,
            reason=f"{num_blocks} blocks were asked for ({target_bytes} bytes each on the target, {draft_bytes} on the "
            f"draft), and both pools need them: {_why_equal(target)}",
            remedy=f"ask for at most {min(of_target, of_draft)}, or give the smaller side more memory",
        )
    if num_blocks < needed + _NULL_BLOCK:
        raise ContractError(
            "num_gpu_blocks" if asked else "kv_cache_bytes",
            target=f"{target.kv_cache_bytes} bytes, {of_target} blocks",
            draft=f"{draft.kv_cache_bytes} bytes, {of_draft} blocks" if draft_bytes else None,
            reason=f"one request of {target.max_model_len} tokens needs {needed} blocks, vLLM keeps one for itself, "
            + (f"{asked} were asked for" if asked else f"there are {num_blocks}")
            + f", and {_why_equal(target)}",
            remedy="ask for more blocks, give the smaller side more memory for its KV cache (a draft on its target's "
            "GPU has what the target's share leaves of it), or lower max_model_len",
        )
    return num_blocks


def _asked(target: SideFacts, draft: SideFacts | None, policy: Policy) -> int | None:
    """The one number that the policy and the two sides ask for; None where nobody does."""
    of_target = target.num_gpu_blocks_override or policy.num_gpu_blocks
    of_draft = (draft.num_gpu_blocks_override if draft else None) or policy.num_gpu_blocks
    if of_target is not None and of_draft is not None and of_target != of_draft:
        raise ContractError(
            "num_gpu_blocks_override",
            target=str(of_target),
            draft=str(of_draft),
            reason=f"the pools would have unequal block counts, and {_why_equal(target)}",
            remedy=f"ask for {min(of_target, of_draft)} on both sides, or on neither",
        )
    return of_target or of_draft


def _why_equal(target: SideFacts) -> str:
    if target.enable_prefix_caching:
        return (
            "a prefix-cache hit gives the draft no states but the target's block ids, under which its own KV must "
            "still lie: the pools are one block space"
        )
    return "the draft's pool is addressed by the target's block ids"
