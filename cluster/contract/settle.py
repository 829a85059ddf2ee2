"""One block space: the choices, block sizes and layouts of all groups, settled together.

Each group of the draft lies on a block table of the target, and the ids in it are the target's. So a draft's group and
the target's groups on that table have one block size; and where two groups of the draft lie on one table, they never
share memory, because the same id is in use in both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.contract.choice import Choice
from cluster.contract.contract import Deviation
from cluster.contract.errors import ContractError
from cluster.contract.facts import BlockSize, KVCacheLayout
from cluster.contract.geometry import Placed, choose_block_size, common_block_sizes, supported_layouts

_Sizes = Mapping[str, tuple[BlockSize, ...]]
"""The target's block table -> the block sizes that everything on it accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A choice for a group of the draft's own, with what it deviates in."""

    choice: Choice
    deviations: tuple[Deviation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """Everything about the groups but the number of blocks."""

    owners: tuple[Choice, ...]
    """The target's groups."""
    readers: tuple[Choice, ...]
    """The draft's reading of some of them."""
    mirrored: bool
    """Whether the draft keeps copies of what it reads: they are in its pool."""
    private: tuple[Choice, ...]
    """The draft's own groups."""
    block_sizes: Mapping[str, int]
    """By the target's block table."""
    target_layout: KVCacheLayout
    draft_layout: KVCacheLayout
    deviations: tuple[Deviation, ...]

    @property
    def target_pool(self) -> list[Placed]:
        return _pool(self.owners, self.block_sizes)

    @property
    def draft_pool(self) -> list[Placed]:
        return _pool(self.allocated_by_draft, self.block_sizes)

    @property
    def allocated_by_draft(self) -> tuple[Choice, ...]:
        return (*self.readers, *self.private) if self.mirrored else self.private


def settle(
    owners: Sequence[Choice], readers: Sequence[Choice], options: Sequence[Sequence[Option]], *, mirrored: bool
) -> Settlement:
    """The first combination, in the order of the options, for which block sizes and layouts exist.

    Raises:
        ContractError: there is none; it names the first thing that had no common value.
    """
    own_sizes = _narrow({}, owners, of_target=True)
    shared_sizes = _narrow(own_sizes, readers)
    wanted = {choice.target_table: choice.group.block_size for choice in owners}
    conflicts: list[ContractError] = []
    for chosen, allowed in _combinations(options, shared_sizes, {}, conflicts):
        block_sizes = {table: choose_block_size(sizes, wanted[table]) for table, sizes in allowed.items()}
        private = [option.choice for option in chosen]
        try:
            copies = readers if mirrored else ()
            target_layout, draft_layout = _layouts(owners, readers, [*copies, *private], block_sizes)
        except ContractError as conflict:
            conflicts.append(conflict)
            continue
        moved = _moved_block_sizes((*readers, *private), own_sizes, wanted, block_sizes)
        return Settlement(
            owners=tuple(owners),
            readers=tuple(readers),
            mirrored=mirrored,
            private=tuple(private),
            block_sizes=block_sizes,
            target_layout=target_layout,
            draft_layout=draft_layout,
            deviations=(*(deviation for option in chosen for deviation in option.deviations), *moved),
        )
    raise conflicts[0]


def _combinations(
    options: Sequence[Sequence[Option]], allowed: _Sizes, tables: Mapping[str, str], conflicts: list[ContractError]
) -> Iterator[tuple[tuple[Option, ...], _Sizes]]:
    """Every combination of one option a group that has block sizes, first options first."""
    if not options:
        yield (), allowed
        return
    for option in options[0]:
        choice = option.choice
        taken = tables.get(choice.group.table, choice.target_table)
        if taken != choice.target_table:
            conflicts.append(_table_conflict(choice, taken))
            continue
        try:
            narrowed = _narrow(allowed, [choice])
        except ContractError as conflict:
            conflicts.append(conflict)
            continue
        placed = {**tables, choice.group.table: choice.target_table}
        for rest, sizes in _combinations(options[1:], narrowed, placed, conflicts):
            yield (option, *rest), sizes


def _narrow(allowed: _Sizes, choices: Sequence[Choice], *, of_target: bool = False) -> _Sizes:
    """What is left of the allowed block sizes once these choices, the target's own or the draft's, are there too."""
    narrowed = dict(allowed)
    for choice in choices:
        before = narrowed.get(choice.target_table, choice.block_sizes)
        left = common_block_sizes(before, choice.block_sizes)
        if not left:
            takes = f"{_text(choice.block_sizes)} for {choice.group.name} ({choice.backend.name})"
            rest = f"{_text(before)} for {choice.target_table if of_target else choice.mirrors}"
            raise ContractError(
                "block_size",
                target=f"{rest} and {takes}" if of_target else rest,
                draft=None if of_target else takes,
                reason="what lies on one block table has one block size, so that a block id means the same tokens "
                "everywhere, and none suits all",
                remedy="name an attention backend for one side whose block sizes the other side takes",
            )
        narrowed[choice.target_table] = left
    return narrowed


def _layouts(
    owners: Sequence[Choice], readers: Sequence[Choice], private: Sequence[Choice], block_sizes: Mapping[str, int]
) -> tuple[KVCacheLayout, KVCacheLayout]:
    """The target's layout and the draft's. A process has one layout, so a draft that reads the target's KV takes that.

    Raises:
        ContractError: there is none for one of the pools.
    """
    target_pool, draft_pool = _pool(owners, block_sizes), _pool(private, block_sizes)
    readable = supported_layouts(target_pool, [choice.backend for choice in readers])
    if not readable:
        alone = supported_layouts(target_pool)
        raise _layout_conflict(_declared(owners), _declared(readers) if alone else None)
    if not private:
        return readable[0], readable[0]
    if not readers:
        own = supported_layouts(draft_pool)
        if not own:
            raise _layout_conflict(None, _declared(private))
        return readable[0], own[0]
    for layout in readable:
        if supported_layouts(draft_pool, only=layout):
            return layout, layout
    raise _layout_conflict("/".join(readable), _declared(private))


def _pool(choices: Sequence[Choice], block_sizes: Mapping[str, int]) -> list[Placed]:
    return [choice.placed(block_sizes[choice.target_table]) for choice in choices]


def _moved_block_sizes(
    choices: Sequence[Choice], own_sizes: _Sizes, wanted: Mapping[str, int], block_sizes: Mapping[str, int]
) -> Iterator[Deviation]:
    """Groups of the draft on whose account a table has another block size than the target alone would give it."""
    for choice in choices:
        alone = choose_block_size(own_sizes[choice.target_table], wanted[choice.target_table])
        settled = block_sizes[choice.target_table]
        if settled != alone and not any(size.accepts(alone) for size in choice.block_sizes):
            yield Deviation(
                group=choice.group.name,
                field="block_size",
                target=str(alone),
                draft=str(settled),
                reason=f"{choice.backend.name} takes blocks of {_text(choice.block_sizes)} tokens, so both sides do",
            )


def _layout_conflict(target: str | None, draft: str | None) -> ContractError:
    return ContractError(
        "kv_cache_layout",
        target=target,
        draft=draft,
        reason="a pool has one layout, which every backend that reads it must take, and which pages of different size "
        "or padding may exclude",
        remedy="name another attention backend for the side whose backends disagree",
    )


def _declared(choices: Sequence[Choice]) -> str:
    """The layouts that each backend takes; `any` where it declares none."""
    return ", ".join(sorted({f"{'/'.join(c.backend.layouts) or 'any'} ({c.backend.name})" for c in choices}))


def _table_conflict(choice: Choice, taken: str) -> ContractError:
    return ContractError(
        "block_table",
        target=f"{taken} and {choice.target_table}",
        draft=f"{choice.group.table} for {choice.group.name}",
        reason="groups of the draft that share a block table would need two different ones of the target",
        remedy="take a draft whose groups attend alike, or a target that keeps all blocks in one table",
    )


def _text(sizes: Sequence[BlockSize]) -> str:
    return " or ".join(map(str, sizes)) or "none"
