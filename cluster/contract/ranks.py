"""The facts of an engine's tensor-parallel ranks: all must plan the same, and one's are those of all."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final

from cluster.contract.errors import ContractViolation
from cluster.contract.facts import SideFacts

_OF_EACH: Final = ("weight_bytes", "kv_cache_bytes")
"""May differ: a rank has the vocabulary's remainder, or a GPU that others use, too."""


def facts_of_all(facts: Sequence[SideFacts]) -> SideFacts:
    """In the order of the ranks. With the memory of the rank that has least: all have as many blocks.

    Raises:
        ContractViolation: a rank would allocate something else than the first.
    """
    first = facts[0]
    for rank, other in enumerate(facts[1:], start=1):
        for name in (field.name for field in fields(SideFacts) if field.name not in _OF_EACH):
            old, new = getattr(first, name), getattr(other, name)
            if old != new:
                raise ContractViolation(name, old=old, new=new, reason=f"tensor-parallel rank {rank} differs from 0")
    return replace(
        first,
        weight_bytes=max(each.weight_bytes for each in facts),
        kv_cache_bytes=min(each.kv_cache_bytes for each in facts),
    )
