"""Why a group of the draft differs from the target, or can't be run at all."""

from collections.abc import Iterator, Sequence

from cluster.contract.choice import Choice, find_fault, same_cache_dtype
from cluster.contract.contract import Deviation
from cluster.contract.errors import ContractError
from cluster.contract.facts import BackendFacts, FormatFacts, GroupFacts
from cluster.contract.policy import AUTO, INHERIT, Policy


def deviations(choice: Choice, reference: Choice, policy: Policy) -> Iterator[Deviation]:
    """In what a choice of the draft differs from the choice of the target that it mirrors."""
    if choice.backend.name != reference.backend.name:
        yield Deviation(
            group=choice.group.name,
            field="attention_backend",
            target=reference.backend.name,
            draft=choice.backend.name,
            reason=_why_other_backend(choice.group, reference, policy),
        )
    if not same_cache_dtype(choice.format, reference.format):
        yield Deviation(
            group=choice.group.name,
            field="cache_dtype",
            target=reference.format.cache_dtype,
            draft=choice.format.cache_dtype,
            reason=_why_other_format(choice.backend, reference, policy),
        )


def _why_other_backend(group: GroupFacts, reference: Choice, policy: Policy) -> str:
    if policy.attention_backend != INHERIT:
        return f"asked for by attention_backend={policy.attention_backend}"
    name = reference.backend.name
    for backend in group.backends:
        if backend.name == name:
            return _obstacle(backend, _wanted(backend, policy), policy.kv_cache_dtype)
    return f"{name} can't run it: {why_infeasible(group, name)}"


def _why_other_format(backend: BackendFacts, reference: Choice, policy: Policy) -> str:
    if policy.kv_cache_dtype != INHERIT:
        return f"asked for by kv_cache_dtype={policy.kv_cache_dtype}"
    wanted = [format for format in backend.formats if same_cache_dtype(format, reference.format)]
    return _obstacle(backend, wanted, reference.format.cache_dtype)


def _obstacle(backend: BackendFacts, wanted: Sequence[FormatFacts], word: str) -> str:
    """Why none of the formats that were wanted was taken under a backend that can run the group."""
    if not wanted:
        return f"{backend.name} runs {_words(backend)} here, not {word}"
    faults = [fault.text for format in wanted if (fault := find_fault(backend, format))]
    if len(faults) == len(wanted):
        return f"{backend.name} would misread it: {'; '.join(sorted(faults))}"
    return f"under {backend.name} it has no block size, or no layout, in common with the rest"


def nothing_runs(group: GroupFacts, reference: Choice, policy: Policy) -> ContractError:
    """The refusal of a group that has no choice under this policy, in terms of whatever excludes the last one."""
    word = policy.attention_backend
    named = word not in (INHERIT, AUTO)
    allowed = [backend for backend in group.backends if not named or backend.name == word]
    if not allowed:
        others = ", ".join(backend.name for backend in group.backends)
        return ContractError(
            "attention_backend",
            target=reference.backend.name,
            draft=f"{word if named else 'none feasible'} for {group.name}",
            reason=why_infeasible(group, word if named else None),
            remedy=f"ask for inherit, auto or one of {others}" if others else "take a draft that this platform runs",
        )
    formats = [(backend, format) for backend in allowed for format in _wanted(backend, policy)]
    faults = [(backend, fault) for backend, format in formats if (fault := find_fault(backend, format))]
    if faults:
        backend, fault = faults[0]
        return ContractError(
            fault.field,
            target=None,
            draft=f"{fault.text} for {group.name} with {backend.name}",
            reason="no backend that was allowed would read what is allocated",
            remedy="let the draft choose among more backends (attention_backend=auto)",
        )
    runs = ", ".join(f"{backend.name} in {_words(backend)}" for backend in allowed)
    return ContractError(
        "kv_cache_dtype",
        target=reference.format.cache_dtype,
        draft=f"{policy.kv_cache_dtype} for {group.name}",
        reason=f"it runs with {runs}",
        remedy="ask for inherit, auto or one of these",
    )


def why_infeasible(group: GroupFacts, name: str | None = None) -> str:
    """vLLM's reasons against one backend, or against all, in one order whatever the order of the facts."""
    said = sorted((other.name, sorted(other.reasons)) for other in group.infeasible if name in (None, other.name))
    if name is not None:
        return "; ".join(", ".join(reasons) for _, reasons in said) or "it isn't among this platform's backends"
    return "; ".join(f"{other}: {', '.join(reasons)}" for other, reasons in said) or "this platform has no backend"


def _wanted(backend: BackendFacts, policy: Policy) -> list[FormatFacts]:
    return [format for format in backend.formats if policy.kv_cache_dtype in (INHERIT, AUTO, format.cache_dtype)]


def _words(backend: BackendFacts) -> str:
    return ", ".join(sorted({format.cache_dtype for format in backend.formats}))
