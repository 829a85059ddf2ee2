"""The choices that a group has, best first."""

from collections.abc import Iterator, Sequence

from cluster.contract.choice import Choice, find_fault, same_cache_dtype
from cluster.contract.errors import ContractError
from cluster.contract.explain import nothing_runs, why_infeasible
from cluster.contract.facts import BackendFacts, FormatFacts, GroupFacts
from cluster.contract.policy import AUTO, INHERIT, Policy

_ADDRESSABLE = {"full_attention", "mla_attention", "sink_full_attention", "sliding_window", "sliding_window_mla"}
"""Kinds of groups whose block table has one entry for every `block_size` tokens that they keep."""


def target_choice(group: GroupFacts) -> Choice:
    """A target keeps what it is configured for: its first backend and that one's first format.

    Raises:
        ContractError: no backend runs the group, or it would read something else than what is allocated.
    """
    if not group.backends:
        raise ContractError(
            "attention_backend",
            target=f"none feasible for {group.name}",
            draft=None,
            reason=why_infeasible(group),
            remedy="change what the reasons name in the target's config",
        )
    backend, format = group.backends[0], group.backends[0].formats[0]
    if fault := find_fault(backend, format):
        raise ContractError(
            fault.field,
            target=f"{fault.text} for {group.name} with {backend.name}",
            draft=None,
            reason="a constructor changed a config after a part of the engine had read it, so the cache would be "
            "allocated in one geometry and read in another",
            remedy="give target and draft configs of their own, and name the attention backend and the KV-cache dtype",
        )
    return Choice(group=group, backend=backend, format=format, mirrors=group.name, target_table=group.table)


def private_choices(group: GroupFacts, target: Sequence[Choice], policy: Policy) -> list[tuple[Choice, Choice]]:
    """Ways to allocate a group of the draft's own, each with the choice of the target that it mirrors.

    Best first: on the block table of the group that is most alike, then with the backend that the policy prefers,
    then in the cache dtype that it prefers. With `inherit` those are the target's.

    Raises:
        ContractError: there is none.
    """
    references = _mirrors(group, target)
    if not references:
        raise ContractError(
            "sliding_window",
            target=", ".join(f"{choice.group.sliding_window} for {choice.group.name}" for choice in target),
            draft=f"{group.sliding_window} for {group.name}",
            reason="the draft's blocks are addressed by a block table of the target, and none keeps the blocks of as "
            "many tokens as the draft attends to",
            remedy="take a draft whose sliding window is at most the target's",
        )
    choices = [(choice, reference) for reference in references for choice in _on_table_of(reference, group, policy)]
    if not choices:
        raise nothing_runs(group, references[0], policy)
    return choices


def _mirrors(group: GroupFacts, target: Sequence[Choice]) -> list[Choice]:
    """Target groups whose block table has a block for every token that `group` attends to; the most alike first."""

    def keeps_enough(choice: Choice) -> bool:
        kept, needed = choice.group.sliding_window, group.sliding_window
        return choice.group.kind in _ADDRESSABLE and (kept is None or (needed is not None and needed <= kept))

    def unlikeness(choice: Choice) -> tuple[bool, int, str]:
        other = choice.group
        alike = other.kind == group.kind and other.sliding_window == group.sliding_window
        return not alike, other.sliding_window or 0, other.name

    return sorted(filter(keeps_enough, target), key=unlikeness)


def _on_table_of(reference: Choice, group: GroupFacts, policy: Policy) -> Iterator[Choice]:
    for backend in _backends(group, reference, policy.attention_backend):
        for format in _formats(backend, reference, policy.kv_cache_dtype):
            if find_fault(backend, format) is None:
                yield Choice(
                    group=group,
                    backend=backend,
                    format=format,
                    mirrors=reference.mirrors,
                    target_table=reference.target_table,
                )


def _backends(group: GroupFacts, reference: Choice, word: str) -> Sequence[BackendFacts]:
    if word == INHERIT:
        return sorted(group.backends, key=lambda backend: backend.name != reference.backend.name)
    return [backend for backend in group.backends if word in (AUTO, backend.name)]


def _formats(backend: BackendFacts, reference: Choice, word: str) -> Sequence[FormatFacts]:
    if word == INHERIT:
        return sorted(backend.formats, key=lambda format: not same_cache_dtype(format, reference.format))
    return [format for format in backend.formats if word in (AUTO, format.cache_dtype)]
