"""`dspark-cluster plan`: the KV contract of a pair, before anything is loaded, and what the pair takes of a GPU.

With `--json`, one object on standard output:

    schema      "dspark-cluster/plan/1"; another number for any change that could break a reader
    contract    the contract as both sides will hold it (schema "dspark-cluster/contract/1", with its digest);
                null when refused
    memory      bytes and tokens on the target's GPU: target_weight_bytes, draft_weight_bytes,
                target_kv_bytes_per_token, draft_kv_bytes_per_token, draft_kv_share, colocated_tokens, separate_tokens,
                tokens_gained, draft_limits, summary (a sentence); null when refused
    refusal     null, or field, target, draft, reason and remedy

Exit code 0 with a contract, 2 without.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table

from cluster.commands.terminal import messages, output
from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.errors import ContractError
from cluster.contract.facts import ConfigWrite, Role, SideFacts
from cluster.contract.memory import MemoryPlan, binary_size, plan_memory
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from cluster.contract.probe import ProbeRequest, probe
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError

PLAN_SCHEMA = "dspark-cluster/plan/1"

_FIGURES = ("layers", "block", "bytes/token", "colocated", "separate")
"""Columns of numbers."""
_USABLE = 0.92
"""Of a GPU: vLLM's default gpu_memory_utilization. What activations and graphs take of it isn't known without a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How to plan. `gpu_bytes` None plans for the memory that the facts name; `save_facts` is a folder."""

    policy: Policy
    gpu_bytes: int | None = None
    save_facts: Path | None = None
    json_output: bool = False
    show_log: bool = False


def plan(settings: EngineSettings | None, known: Sequence[SideFacts], options: PlanOptions) -> KVContract:
    """Probe the sides that aren't `known`, negotiate and print.

    Raises:
        UserError: facts are missing and there are no settings to probe with, or a model can't be built here.
        ContractError: refused.
    """
    target, draft = _both_sides(settings, known, options)
    if options.gpu_bytes is not None:
        usable = int(options.gpu_bytes * _USABLE)
        target = _with_memory(target, usable, target.weight_bytes + draft.projection_bytes)
        draft = _with_memory(draft, usable, draft.weight_bytes)
    try:
        contract = negotiate(target, draft, options.policy)
    except ContractError as refusal:
        if options.json_output:
            print(json.dumps(_document(refusal=refusal)))
        raise
    memory = plan_memory(
        target,
        draft,
        contract,
        gpu_bytes=target.kv_cache_bytes + target.weight_bytes + draft.projection_bytes,
        draft_gpu_bytes=draft.kv_cache_bytes + draft.weight_bytes,
    )
    if options.json_output:
        print(json.dumps(_document(contract=contract, memory=memory)))
    else:
        output().print(_report(target, draft, contract, memory))
    return contract


def read_facts(paths: Sequence[Path]) -> list[SideFacts]:
    """Facts that `--save-facts` wrote. Raises UserError for a file that isn't, or two of one side."""
    sides: dict[Role, SideFacts] = {}
    for path in paths:
        try:
            facts = SideFacts.from_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"facts file {path}", f"it can't be read ({error})", "check its path") from error
        except UserError as error:
            raise UserError(f"facts file {path}", f"{error.what}, but {error.why}", error.remedy) from error
        if facts.role in sides:
            raise UserError(f"facts file {path}", f"it is the second one of a {facts.role}", "give one of each side")
        sides[facts.role] = facts
    return list(sides.values())


def _both_sides(
    settings: EngineSettings | None, known: Sequence[SideFacts], options: PlanOptions
) -> tuple[SideFacts, SideFacts]:
    sides = {facts.role: facts for facts in known}
    roles: tuple[Role, ...] = ("target", "draft")
    missing = [role for role in roles if role not in sides]
    if missing:
        if settings is None or settings.speculation is None:
            raise UserError(
                f"no facts of the {missing[0]}",
                "there are neither models to probe nor a file of facts",
                "name --target and --draft, or --facts for both sides",
            )
        names = {"target": settings.target.name, "draft": settings.speculation.draft.name}
        arguments = settings.to_engine_args()
        requests = [ProbeRequest(role=role, model=names[role], engine_args=arguments) for role in missing]
        with messages.status(f"probing {' and '.join(names[role] for role in missing)}"):
            sides |= {facts.role: facts for facts in probe(*requests, show_log=options.show_log)}
    if options.save_facts is not None:
        _save(options.save_facts, [sides[role] for role in roles])
    return sides["target"], sides["draft"]


def _save(folder: Path, sides: Sequence[SideFacts]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for facts in sides:
            (folder / f"{facts.role}.json").write_text(facts.to_json(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save-facts {folder}", str(error), "name a folder that you may write") from error


def _with_memory(facts: SideFacts, usable: int, weights: int) -> SideFacts:
    return replace(facts, kv_cache_bytes=max(0, usable - weights))


def _document(
    *,
    contract: KVContract | None = None,
    memory: MemoryPlan | None = None,
    refusal: ContractError | None = None,
) -> dict[str, Any]:
    figures = None
    if memory is not None:
        derived = {"draft_kv_share": memory.draft_kv_share, "tokens_gained": memory.tokens_gained}
        figures = {**asdict(memory), **derived, "summary": str(memory)}
    return {
        "schema": PLAN_SCHEMA,
        "contract": json.loads(contract.to_json()) if contract else None,
        "memory": figures,
        "refusal": {key: getattr(refusal, key) for key in ("field", "target", "draft", "reason", "remedy")}
        if refusal
        else None,
    }


def _report(target: SideFacts, draft: SideFacts, contract: KVContract, memory: MemoryPlan) -> RenderableType:
    wire = contract.wire
    states = f", states of {wire.hidden_size} {wire.dtype} on the wire" if wire.hidden_size else ""
    caching = "with" if contract.enable_prefix_caching else "without"
    return Group(
        f"contract {contract.digest[:16]} · vLLM {contract.vllm_version} · {wire.method}, "
        f"K = {wire.num_speculative_tokens}{states}",
        f"target {escape(target.model)}\ndraft  {escape(draft.model)}",
        f"{contract.num_blocks:,} blocks in {_pools(contract)}, {caching} prefix caching\n",
        _groups(contract),
        _deviations(contract),
        _other_backends(target, draft),
        _writes(contract),
        _memory(target, draft, memory),
        f"\n{memory}",
    )


def _pools(contract: KVContract) -> str:
    if contract.kv_sharing == "map":
        return "the target's pool, whose shared groups the draft maps"
    mirrors = ", the draft's with mirrors of what it reads of the target's" * (contract.kv_sharing == "mirror")
    return f"each pool{mirrors}"


def _section(title: str, *rows: Sequence[str], columns: Sequence[str]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "right" if column.endswith(_FIGURES) else "left"
        table.add_column(column, justify=justify, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*map(escape, row))
    table.add_row()
    return Group(f"[bold]{title}[/bold]", table)  # a table's own title is folded to its width


def _groups(contract: KVContract) -> RenderableType:
    columns = ("side", "group", "block ids of", "layers", "backend", "dtype", "block", "bytes/token", "layout")
    rows = [
        (
            group.role,
            group.name,
            "" if group.role == "target" else group.mirrors,
            str(len(group.layers)),
            group.attention_backend,
            _dtype(group),
            str(group.block_size),
            f"{len(group.layers) * group.page_size_bytes // group.block_size:,}",
            group.layout,
        )
        for group in contract.groups
    ]
    return _section("KV-cache groups", *rows, columns=columns)


def _dtype(group: GroupContract) -> str:
    return group.dtype if group.cache_dtype in ("auto", group.dtype) else f"{group.cache_dtype} ({group.dtype})"


def _deviations(contract: KVContract) -> RenderableType:
    rows = [(each.group, each.field, each.target, each.draft, each.reason) for each in contract.deviations]
    if not rows:
        return _section("Deviations", columns=("none: the draft's groups have the target's backend and cache dtype",))
    return _section("Deviations", *rows, columns=("group", "field", "target", "draft", "reason"))


def _other_backends(target: SideFacts, draft: SideFacts) -> RenderableType:
    """What else would run, and why the rest wouldn't; nothing where there was no choice."""
    rows = [
        (
            facts.role,
            group.name,
            ", ".join(backend.name for backend in group.backends),
            "\n".join(f"{other.name}: {', '.join(other.reasons)}" for other in group.infeasible),
        )
        for facts in (target, draft)
        for group in facts.groups
        if len(group.backends) > 1 or group.infeasible
    ]
    columns = ("side", "group", "feasible", "not feasible")
    return _section("Attention backends", *rows, columns=columns) if rows else Group()


def _writes(contract: KVContract) -> RenderableType:
    rows = [
        (role, f"{write.field}: {write.old} → {write.new}\nby {write.writer}, {write.location}", _effect(role, write))
        for role, side in (("target", contract.target), ("draft", contract.draft))
        for write in side.constructor_writes
    ]
    if not rows:
        return _section("Constructor writes", columns=("none: no constructor changed a config",))
    return _section("Constructor writes", *rows, columns=("side", "write", "with both models in one process"))


def _effect(role: str, write: ConfigWrite) -> str:
    if write.field.startswith("draft_model_config."):
        return "the draft's own config: no effect on the target"
    return f"changes the {'draft' if role == 'target' else 'target'}'s config too"


def _memory(target: SideFacts, draft: SideFacts, memory: MemoryPlan) -> RenderableType:
    alone = target.weight_bytes + draft.projection_bytes
    together = memory.target_weight_bytes + memory.draft_weight_bytes
    kv = memory.target_kv_bytes_per_token + memory.draft_kv_bytes_per_token
    holder = "memory" if target.platform == "cpu" else "GPU"
    return _section(
        f"The target's {holder}, with {binary_size(alone + target.kv_cache_bytes)} for weights and KV",
        ("weights", binary_size(together), binary_size(alone)),
        ("KV bytes a token", f"{kv:,}", f"{memory.target_kv_bytes_per_token:,}"),
        ("tokens of KV", f"{memory.colocated_tokens:,}", f"{memory.separate_tokens:,}"),
        columns=("", "draft colocated", "draft separate"),
    )
