"""A group of the target that the draft reads too: there the two sides agree in everything, or there is no pair."""

from collections.abc import Iterator, Sequence

from cluster.contract.choice import Choice, find_fault, same_cache_dtype
from cluster.contract.errors import ContractError
from cluster.contract.explain import why_infeasible
from cluster.contract.facts import BackendFacts, GroupFacts
from cluster.contract.policy import AUTO, INHERIT, Policy

_REMEDY = "let both sides read the same model config, on the same platform and vLLM build"


def shared_choice(group: GroupFacts, target: Sequence[Choice], policy: Policy) -> Choice:
    """The draft's reading of a target's group, once everything but block size and layout was found to agree.

    Those two depend on the other groups: `negotiate` settles them for both sides at once.

    Raises:
        ContractError: the draft would read the target's pages as something else than they are.
    """
    owner = next((choice for choice in target if set(group.layers) <= set(choice.group.layers)), None)
    if owner is None:
        layers = {layer for choice in target for layer in choice.group.layers}
        raise _refusal(
            "layers",
            f"{len(layers)} layers in {', '.join(choice.group.name for choice in target)}",
            ", ".join(sorted(set(group.layers) - layers) or group.layers),
            f"the draft reads layers ({group.name}) that the target doesn't have in one group",
        )
    _check_policy(group, owner, policy)
    backend = _same_backend(group, owner)
    format = next((format for format in backend.formats if same_cache_dtype(format, owner.format)), None)
    if format is None:
        words = ", ".join(format.cache_dtype for format in backend.formats)
        raise _refusal(
            "cache_dtype",
            f"{owner.format.cache_dtype} for {group.name}",
            words,
            f"the draft reads the target's KV, and {backend.name} reads it there in {words} only",
        )
    choice = Choice(group=group, backend=backend, format=format, mirrors=owner.mirrors, target_table=owner.target_table)
    for field, mine, its in _geometry(owner, choice):
        if mine != its:
            raise _refusal(
                field,
                f"{mine} for {group.name}",
                str(its),
                "the draft would read the target's pages in another geometry than they are written in",
            )
    if fault := find_fault(backend, format):
        found = f"{fault.text} for {group.name}"
        raise _refusal(fault.field, None, found, "the draft would misread the target's pages")
    return choice


def _check_policy(group: GroupFacts, owner: Choice, policy: Policy) -> None:
    """A shared group can't have a backend or a dtype of its own, whoever asks for it."""
    for option, field, asked, of_target in (
        ("attention_backend", "attention_backend", policy.attention_backend, owner.backend.name),
        ("kv_cache_dtype", "cache_dtype", policy.kv_cache_dtype, owner.format.cache_dtype),
    ):
        if asked not in (INHERIT, AUTO, of_target):
            raise ContractError(
                field,
                target=f"{of_target} for {group.name}",
                draft=asked,
                reason="the draft reads this group of the target, so it can't have another",
                remedy=f"ask for {option}=inherit, or give the target {asked} too",
            )


def _same_backend(group: GroupFacts, owner: Choice) -> BackendFacts:
    for backend in group.backends:
        if backend.name == owner.backend.name:
            return backend
    raise _refusal(
        "attention_backend",
        f"{owner.backend.name} for {group.name}",
        ", ".join(backend.name for backend in group.backends) or "none feasible",
        f"the draft reads the target's KV and can't with that backend: {why_infeasible(group, owner.backend.name)}",
    )


def _geometry(owner: Choice, reader: Choice) -> Iterator[tuple[str, object, object]]:
    """(field, the owner's value, the reader's value) for everything that says where a byte is, and what it means."""
    mine, its = owner.format, reader.format
    yield "row_bytes", f"{mine.row_bytes} bytes", f"{its.row_bytes} bytes"
    for field in (
        "dtype",
        "num_heads",
        "tokens_per_state",
        "page_size_padded",
        "page_alignment",
        "block_stride_alignment",
    ):
        yield field, getattr(mine, field), getattr(its, field)
    for field in ("kind", "sliding_window", "num_kv_heads", "head_size", "head_size_v", "scales"):
        yield field, getattr(owner.group, field), getattr(reader.group, field)


def _refusal(field: str, target: str | None, draft: str, reason: str) -> ContractError:
    return ContractError(field, target=target, draft=draft, reason=reason, remedy=_REMEDY)
