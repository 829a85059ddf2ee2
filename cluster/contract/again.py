"""The contract of a pair in which a side has allocated already: the one that it holds, or none."""

from dataclasses import replace

from cluster.contract.codec import to_plain
from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError
from cluster.contract.facts import SideFacts
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy


def negotiate_again(target: SideFacts, draft: SideFacts, policy: Policy, held: KVContract) -> KVContract:
    """`held`, if these two can be a pair under it. What a side has free is another number at each start, so the number
    of blocks is asked for, not found.

    Raises:
        ContractError: they can't, with the first field in which their contract would be another.
    """
    asked = {side.role: replace(side, num_gpu_blocks_override=held.num_blocks) for side in (target, draft)}
    contract = negotiate(asked["target"], asked["draft"], policy)
    if contract.digest != held.digest:
        field, before, now = _difference(to_plain(held), to_plain(contract))
        raise ContractError(
            field,
            target=before,
            draft=now,
            reason="one side has allocated its KV cache under a contract with the first value, and the pair's would "
            "have the second",
            remedy="start both sides again, with one configuration",
        )
    for side in (target, draft):
        needed = held.pool_bytes(side.role)
        if side.num_gpu_blocks_override is None and side.kv_cache_bytes < needed:
            found = f"{side.kv_cache_bytes} bytes"
            raise ContractError(
                "kv_cache_bytes",
                target=found if side.role == "target" else None,
                draft=found if side.role == "draft" else None,
                reason=f"the contract that the other side has allocated by takes {needed}",
                remedy="free memory on its device, or start both sides again",
            )
    return held


def _difference(before: object, now: object, path: str = "") -> tuple[str, str, str]:
    """The first place in which two plain documents differ, and what is there."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before:
            if before[key] != now.get(key):
                return _difference(before[key], now.get(key), f"{path}.{key}" if path else str(key))
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{index}]")
    return path, str(before), str(now)
