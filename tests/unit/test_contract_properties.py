"""What holds for every pair of facts, checked by rules that are written down here once more, and more simply."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.errors import ContractError
from cluster.contract.facts import (
    BackendFacts,
    BlockSize,
    ConfigWrite,
    FormatFacts,
    GroupFacts,
    InfeasibleBackend,
    KVCacheLayout,
    SideFacts,
)
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from tests.unit.test_contract_pairs import PAIRS, Pair, side
from tests.unit.test_contract_pairs import group as group_facts

BACKENDS = ("A", "B", "C")
LARGEST = 384  # sizes are multiples of 16, and their common multiples at most this

formats = st.builds(
    FormatFacts,
    cache_dtype=st.sampled_from(["auto", "bfloat16", "fp8"]),
    dtype=st.sampled_from(["bfloat16", "uint8"]),
    num_heads=st.sampled_from([1, 2]),
    state_content_bytes=st.sampled_from([64, 80]),
    read_row_bytes=st.sampled_from([None] * 9 + [64]),
    page_alignment=st.sampled_from([1, 1, 1, 576]),
    tokens_per_state=st.sampled_from([1] * 6 + [32]),
)
block_sizes = st.builds(BlockSize, size=st.sampled_from([16, 32, 48, 64, 128]), multiple=st.booleans())
layouts: st.SearchStrategy[tuple[KVCacheLayout, ...]] = st.sampled_from(
    [(), (), ("LBNHC",), ("LBHNC", "BLHNC"), ("BLHNC",), ("LHBNC", "LBHNC")]
)


@st.composite
def backends(draw: st.DrawFn, *, at_least: int) -> tuple[BackendFacts, ...]:
    names = draw(st.lists(st.sampled_from(BACKENDS), unique=True, min_size=at_least, max_size=3))
    return tuple(
        BackendFacts(
            name=name,
            formats=tuple(draw(st.lists(formats, min_size=1, max_size=2, unique_by=lambda f: f.cache_dtype))),
            kernel_block_sizes=tuple(draw(st.lists(block_sizes, min_size=1, max_size=2, unique=True))),
            layouts=draw(layouts),
            splits_blocks=draw(st.booleans()),
            index_width=draw(st.sampled_from([None] * 5 + [256])),
            index_widths_read=draw(st.sampled_from([(), (128, 256), (256,), (128,)])),
        )
        for name in names
    )


@st.composite
def groups(draw: st.DrawFn, role: str) -> tuple[GroupFacts, ...]:
    def one(name: str) -> GroupFacts:
        window = draw(st.sampled_from([None, None, None, 512, 1024]))
        feasible = draw(backends(at_least=int(draw(st.integers(1, 16)) < 16)))
        missing = [name for name in BACKENDS if name not in {backend.name for backend in feasible}]
        reasons = st.lists(st.sampled_from(["head_size not supported", "dtype not supported"]), max_size=2, unique=True)
        return group_facts(
            name,
            role,
            *feasible,
            infeasible=tuple(InfeasibleBackend(name=name, reasons=tuple(draw(reasons))) for name in missing),
            layers=draw(st.integers(1, 3)),
            kind="sliding_window" if window else "full_attention",
            sliding_window=window,
            block_size=draw(st.sampled_from([16, 64, 128])),
            block_table=draw(st.sampled_from([None, None, f"{role}-table"])),
        )

    return tuple(one(f"{role[0]}{i}") for i in range(draw(st.integers(1, 2))))


OTHERS: dict[str, Any] = {
    "vllm_version": "0.33.0",
    "runner": "v1",
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "vocab_size": 32_000,
    "draft_vocab_size": 1 << 20,
    "tokenizer_digest": "sha256:other",
    "wire_hidden_size": 1024,
    "aux_hidden_state_layers": (2, 10, 99),
    "num_gpu_blocks_override": 77,
    "kv_cache_bytes": 1 << 20,
}


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    target = side("target", *draw(groups("target")), max_model_len=256, kv_cache_bytes=1 << 26)
    draft = side("draft", *draw(groups("draft")), kv_cache_bytes=1 << 26)
    if draw(st.integers(1, 8)) == 8:
        field = draw(st.sampled_from(sorted(OTHERS)))
        draft = replace(draft, **{field: OTHERS[field]})
    if draw(st.integers(1, 8)) == 8:
        target = replace(target, num_gpu_blocks_override=draw(st.sampled_from([77, 500])))
    writes = [ConfigWrite(field=f"cache_config.f{i}", old="1", new="2", writer="W", location="w.py:1") for i in (1, 2)]
    return target, replace(draft, constructor_writes=tuple(writes))


policies = st.builds(
    Policy,
    attention_backend=st.sampled_from(["inherit", "inherit", "inherit", "auto", "B"]),
    kv_cache_dtype=st.sampled_from(["inherit", "inherit", "inherit", "auto", "fp8"]),
    strict=st.booleans(),
    num_gpu_blocks=st.sampled_from([None] * 6 + [100, 10**9]),
)


def outcome(target: SideFacts, draft: SideFacts, policy: Policy) -> KVContract | ContractError:
    try:
        return negotiate(target, draft, policy)
    except ContractError as refusal:
        return refusal


def signature(result: KVContract | ContractError) -> str:
    return str(result) if isinstance(result, ContractError) else result.digest


@settings(max_examples=40, deadline=None)
@given(pair=pairs(), policy=policies, data=st.data())
def test_an_engines_order_of_things_changes_nothing(pair: Pair, policy: Policy, data: st.DataObject) -> None:
    def shuffled(items: Any) -> Any:
        return tuple(data.draw(st.permutations(items)))

    def reordered(facts: SideFacts) -> SideFacts:
        def inside(group: GroupFacts) -> GroupFacts:
            infeasible = [replace(other, reasons=shuffled(other.reasons)) for other in group.infeasible]
            backends = [replace(b, kernel_block_sizes=shuffled(b.kernel_block_sizes)) for b in group.backends]
            return replace(
                group, layers=shuffled(group.layers), infeasible=shuffled(infeasible), backends=tuple(backends)
            )

        return replace(
            facts,
            groups=shuffled([inside(group) for group in facts.groups]),
            constructor_writes=shuffled(facts.constructor_writes),
        )

    expected = signature(outcome(*pair, policy))
    assert signature(outcome(*pair, policy)) == expected
    assert signature(outcome(reordered(pair[0]), reordered(pair[1]), policy)) == expected


def test_another_process_comes_to_the_same_digests() -> None:
    program = (
        "import sys\n"
        "from cluster.contract.facts import SideFacts\n"
        "from cluster.contract.negotiate import negotiate\n"
        "from cluster.contract.policy import Policy\n"
        "sides = [SideFacts.from_json(text) for text in sys.stdin.read().split('\\0')]\n"
        "for target, draft in zip(sides[::2], sides[1::2]):\n"
        "    print(negotiate(target, draft, Policy()).digest)\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)\n"
    )
    sides = [facts.to_json() for pair in PAIRS for facts in pair()]
    expected = [negotiate(*pair(), Policy()).digest for pair in PAIRS]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="\0".join(sides),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.split() == expected


# A contract satisfies both sides.


def accepts(backend: BackendFacts, format: FormatFacts, block_size: int) -> bool:
    splits = backend.splits_blocks and format.tokens_per_state == 1
    return block_size % format.tokens_per_state == 0 and any(
        block_size % size.size == 0 if size.multiple or splits else block_size == size.size
        for size in backend.kernel_block_sizes
    )


def sound(backend: BackendFacts, format: FormatFacts) -> bool:
    read = format.read_row_bytes or format.num_heads * format.state_content_bytes
    widths = backend.index_widths_read
    return read == format.num_heads * format.state_content_bytes and (
        backend.index_width is None or not widths or backend.index_width in widths
    )


def meaning(format: FormatFacts) -> str:
    return (
        format.dtype
        if format.cache_dtype == "auto"
        else {"fp8": "fp8_e4m3"}.get(format.cache_dtype, format.cache_dtype)
    )


def chosen(facts: GroupFacts, contract: GroupContract) -> tuple[BackendFacts, FormatFacts]:
    (backend,) = (backend for backend in facts.backends if backend.name == contract.attention_backend)
    (format,) = (format for format in backend.formats if format.cache_dtype == contract.cache_dtype)
    return backend, format


def check_group(facts: GroupFacts, contract: GroupContract, pool_bytes: int) -> None:
    backend, format = chosen(facts, contract)
    assert sound(backend, format)
    assert accepts(backend, format, contract.block_size)
    assert not backend.layouts or contract.layout in backend.layouts
    assert contract.dtype == format.dtype
    assert contract.row_bytes == format.num_heads * format.state_content_bytes
    assert contract.page_size_bytes % format.page_alignment == 0
    assert contract.block_size % contract.kernel_block_size == 0
    shape = contract.shape
    assert shape[0] * contract.kernel_block_size == contract.num_blocks * contract.block_size
    states = contract.kernel_block_size // format.tokens_per_state
    assert shape[1:] == (format.num_heads, states, format.state_content_bytes)
    # The last byte of a layer lies inside the pool, and no two bytes of it are one.
    assert sum((length - 1) * stride for length, stride in zip(shape, contract.strides, strict=True)) < pool_bytes
    axes = sorted((stride, length) for stride, length in zip(contract.strides, shape, strict=True) if length > 1)
    assert all(stride * length <= following for (stride, length), (following, _) in pairwise(axes))


def check_contract(contract: KVContract, target: SideFacts, draft: SideFacts, policy: Policy) -> None:
    facts = {group.name: group for group in (*target.groups, *draft.groups)}
    assert {group.name for group in contract.groups} == set(facts)
    for role, its in (("target", target), ("draft", draft)):
        pool = contract.num_blocks * contract.side(role).bytes_per_block  # type: ignore[arg-type]
        assert pool <= its.kv_cache_bytes or its.num_gpu_blocks_override == contract.num_blocks
        for group in contract.groups_of(role):  # type: ignore[arg-type]
            assert group.num_blocks == contract.num_blocks
            assert group.layout == contract.side(role).layout  # type: ignore[arg-type]
            check_group(facts[group.name], group, pool)
    for group in contract.groups_of("target"):
        first = facts[group.name].backends[0]
        assert (group.attention_backend, group.cache_dtype) == (first.name, first.formats[0].cache_dtype)
    differing = set()
    for group in contract.groups_of("draft"):
        owner = contract.group("target", group.mirrors)
        assert group.block_size == owner.block_size
        assert owner.sliding_window is None or (group.sliding_window or 10**9) <= owner.sliding_window
        if policy.attention_backend in BACKENDS:
            assert group.attention_backend == policy.attention_backend
        if policy.kv_cache_dtype == "fp8":
            assert group.cache_dtype == "fp8"
        if group.attention_backend != owner.attention_backend:
            differing.add((group.name, "attention_backend"))
        if meaning(chosen(facts[group.name], group)[1]) != meaning(chosen(facts[owner.name], owner)[1]):
            differing.add((group.name, "cache_dtype"))
    said = {(deviation.group, deviation.field) for deviation in contract.deviations}
    assert {(name, field) for name, field in said if field != "block_size"} == differing
    assert not (policy.strict and said)
    for number in (policy.num_gpu_blocks, target.num_gpu_blocks_override, draft.num_gpu_blocks_override):
        assert number in (None, contract.num_blocks)


# A refusal names what conflicts.


def ways(group: GroupFacts, policy: Policy) -> list[tuple[BackendFacts, FormatFacts]]:
    """Everything that the policy allows a group of the draft, and that reads what it allocates."""
    return [
        (backend, format)
        for backend in group.backends
        for format in backend.formats
        if policy.attention_backend in ("inherit", "auto", backend.name)
        and policy.kv_cache_dtype in ("inherit", "auto", format.cache_dtype)
        and sound(backend, format)
    ]


Way = tuple[BackendFacts, FormatFacts]


def tables(target: SideFacts, draft: SideFacts, policy: Policy) -> Iterator[dict[str, list[Way]]]:
    """Every way to put the draft's groups on the target's tables: what then shares a block size."""
    firsts = {owner.name: (owner.backends[0], owner.backends[0].formats[0]) for owner in target.groups}
    on = [
        [
            (owner.block_table or owner.name, way)
            for owner in target.groups
            if owner.sliding_window is None or (group.sliding_window or 10**9) <= owner.sliding_window
            for way in ways(group, policy)
            if not policy.strict
            or (way[0].name == firsts[owner.name][0].name and meaning(way[1]) == meaning(firsts[owner.name][1]))
        ]
        for group in draft.groups
    ]
    for combination in product(*on):
        found: dict[str, list[Way]] = {}
        for owner in target.groups:
            found.setdefault(owner.block_table or owner.name, []).append(firsts[owner.name])
        mirrored: dict[str, set[str]] = {}
        for group, (table, way) in zip(draft.groups, combination, strict=True):
            found[table].append(way)
            mirrored.setdefault(group.block_table or group.name, set()).add(table)
        if all(len(its) == 1 for its in mirrored.values()):
            yield found


TOO_FEW = re.compile(r"needs (\d+) blocks, vLLM keeps one for itself, (?:there are )?(\d+)")


def check_refusal(error: ContractError, target: SideFacts, draft: SideFacts, policy: Policy) -> None:
    field = error.field
    assert error.target != error.draft or field in ("num_gpu_blocks", "kv_cache_bytes"), str(error)
    if field in OTHERS and field not in ("num_gpu_blocks_override", "kv_cache_bytes", "draft_vocab_size"):
        assert getattr(target, field) != getattr(draft, field)
    elif field == "draft_vocab_size":
        assert (draft.draft_vocab_size or 0) > target.vocab_size
    elif field == "num_gpu_blocks_override":
        asked = {target.num_gpu_blocks_override, draft.num_gpu_blocks_override, policy.num_gpu_blocks} - {None}
        assert len(asked) > 1
    elif found := TOO_FEW.search(error.reason):
        needed, blocks = map(int, found.groups())
        assert blocks <= needed  # one is vLLM's own
        assert (field == "num_gpu_blocks") == ("were asked for" in error.reason)
    elif field == "num_gpu_blocks":
        limits = [int(text.split()[-1]) for text in (error.target, error.draft) if text]
        asked = (target.num_gpu_blocks_override, draft.num_gpu_blocks_override, policy.num_gpu_blocks)
        assert max(number or 0 for number in asked) > max(limits)
    elif field == "sliding_window":
        (stranded,) = (group for group in draft.groups if str(error.draft).endswith(f"for {group.name}"))
        needed = stranded.sliding_window or 10**9
        assert all(owner.sliding_window is not None and owner.sliding_window < needed for owner in target.groups)
    elif field in ("row_bytes", "index_width"):
        torn = [(b, f) for side in (target, draft) for g in side.groups for b in g.backends for f in b.formats]
        assert any(not sound(backend, format) for backend, format in torn)
    elif field == "block_size" and "strict" not in error.reason:
        fitting = [
            all(
                any(all(accepts(*way, size) for way in on) for size in range(16, LARGEST + 1, 16))
                for on in found.values()
            )
            for found in tables(target, draft, policy)
        ]
        assert not all(fitting) or not fitting
        # Where a layout can't stand in the way, no combination at all has block sizes.
        assert not any(fitting) or any(b.layouts for g in (*target.groups, *draft.groups) for b in g.backends)
    elif field == "kv_cache_layout":
        at_fault = target if error.draft is None else draft
        assert any(backend.layouts for group in at_fault.groups for backend in group.backends)
    elif field == "block_table":
        assert len({group.block_table for group in draft.groups if group.block_table}) < len(draft.groups)
        assert len({owner.block_table or owner.name for owner in target.groups}) > 1
    elif field in ("attention_backend", "cache_dtype", "kv_cache_dtype"):
        strict = policy.strict and "strict" in error.reason
        stranded_target = [group for group in target.groups if not group.backends]
        stranded_draft = [group for group in draft.groups if not ways(group, policy)]
        assert strict or stranded_target or stranded_draft
    else:
        assert field == "block_size", field
        assert policy.strict


@settings(max_examples=80, deadline=None)
@given(pair=pairs(), policy=policies)
def test_a_contract_satisfies_both_sides_and_a_refusal_names_a_real_conflict(pair: Pair, policy: Policy) -> None:
    result = outcome(*pair, policy)
    if isinstance(result, KVContract):
        check_contract(result, *pair, policy)
    else:
        check_refusal(result, *pair, policy)


@settings(max_examples=30, deadline=None)
@given(pair=pairs(), policy=policies)
def test_a_pair_that_needs_no_deviation_has_a_contract_whether_strict_or_not(pair: Pair, policy: Policy) -> None:
    strictly = outcome(*pair, replace(policy, strict=True))
    loosely = outcome(*pair, replace(policy, strict=False))
    if isinstance(strictly, KVContract):
        assert isinstance(loosely, KVContract)
    elif isinstance(loosely, KVContract):
        assert loosely.deviations
