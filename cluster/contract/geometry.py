"""The arithmetic of a paged KV cache, as vLLM 0.32.0 does it, without torch.

A pool is [L, B, H, N, C]: layers, blocks, head slots, stored states a block, bytes a state. One layer's tensor is the
view [B, H, N, C] of it. Follows `v1/kv_cache_interface.py` (compute_layout_strides), `v1/core/kv_cache_utils.py`
(_get_kv_cache_bytes_per_block, get_kv_cache_config_from_groups) and `v1/attention/backends/utils.py`
(get_supported_kv_cache_layouts, resolve_kv_cache_layout); a test compares the figures with vLLM's own.
"""

import math
import typing
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.contract.facts import BackendFacts, BlockSize, FormatFacts, KVCacheLayout

ENUM_ORDER: tuple[KVCacheLayout, ...] = typing.get_args(KVCacheLayout)
DEFAULT_PREFERENCE: tuple[KVCacheLayout, ...] = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""vLLM's order where no backend declares one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One group in a side's pool: what its pages are, for the layout and the strides of the whole side."""

    table: str
    num_layers: int
    block_size: int
    backend: BackendFacts
    format: FormatFacts
    sliding_window: int | None = None

    @property
    def page(self) -> tuple[int, int, int]:
        """(H, N, C) of a page, C in bytes."""
        return self.format.num_heads, num_states(self.format, self.block_size), self.format.state_content_bytes

    @property
    def page_size_bytes(self) -> int:
        padded = self.format.page_size_padded or round_up(math.prod(self.page), self.format.page_alignment)
        return max(padded, math.prod(self.page))

    @property
    def block_stride_bytes(self) -> int:
        """From one block to the next where a layer's blocks lie together."""
        return round_up(self.page_size_bytes, self.format.block_stride_alignment)


def _is_padded(placed: Placed) -> bool:
    return placed.page_size_bytes != math.prod(placed.page)


def num_states(format: FormatFacts, block_size: int) -> int:
    return block_size // format.tokens_per_state if format.tokens_per_state > 0 else 1


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def is_block_outermost(layout: KVCacheLayout) -> bool:
    return layout[0] == "B"


def bytes_per_block(pool: Sequence[Placed], layout: KVCacheLayout) -> int:
    """Bytes that one block id stands for: those of the largest table, for a block id belongs to one table at a time."""
    outermost = is_block_outermost(layout)
    tables: dict[str, int] = defaultdict(int)
    for placed in pool:
        page = placed.page_size_bytes if outermost else placed.block_stride_bytes
        tables[placed.table] += placed.num_layers * page
    largest = max(tables.values())
    if outermost:
        return round_up(largest, math.lcm(*(placed.format.block_stride_alignment for placed in pool)))
    return largest


def blocks_per_request(pool: Sequence[Placed], *, num_tokens: int, max_in_flight_tokens: int) -> int:
    """Block ids that one request of `num_tokens` holds at once, over all tables."""
    tables: dict[str, int] = {}
    for placed in pool:
        held = blocks_held(
            placed.block_size,
            placed.sliding_window,
            one_state=placed.format.tokens_per_state < 0,
            num_tokens=num_tokens,
            max_in_flight_tokens=max_in_flight_tokens,
        )
        tables[placed.table] = max(tables.get(placed.table, 0), held)
    return sum(tables.values())


def blocks_held(
    block_size: int, sliding_window: int | None, *, one_state: bool, num_tokens: int, max_in_flight_tokens: int
) -> int:
    """Blocks of one table that a request of `num_tokens` holds at once.

    A sliding window gives back what it has left behind, but only once the tokens in flight are settled, and it needn't
    begin where a block does.
    """
    if one_state:
        return 1
    if sliding_window is None:
        return -(-num_tokens // block_size)
    held = min(sliding_window - 1 + max_in_flight_tokens, num_tokens)
    return -(-held // block_size) + 1


def kernel_block_size(placed: Placed, layout: KVCacheLayout) -> int:
    """Tokens of the blocks that the kernels see: a divisor of the block size where a block has to be split."""
    sizes = placed.backend.kernel_block_sizes
    whole = any(size.accepts(placed.block_size) for size in sizes)
    if whole or not _may_split(placed.backend, placed.format) or is_block_outermost(layout):
        return placed.block_size
    return max(size.size for size in sizes if placed.block_size % size.size == 0)


def view(
    placed: Placed, pool: Sequence[Placed], layout: KVCacheLayout, num_blocks: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Shape and strides of one layer's tensor [B, H, N, C], in bytes: C, and every stride, count bytes."""
    ratio = placed.block_size // kernel_block_size(placed, layout)
    heads, states, content = placed.page
    shape = {"L": placed.num_layers, "B": num_blocks * ratio, "H": heads, "N": states // ratio, "C": content}
    fixed: dict[str, int] = {}
    if is_block_outermost(layout):
        fixed["B"] = bytes_per_block(pool, layout)
    elif ratio > 1 or placed.block_stride_bytes != placed.page_size_bytes:
        fixed["B"] = placed.block_stride_bytes // ratio
    # The innermost of the axes outside a page carries the page's padding, where it has any.
    padded_axis = max(layout.index("L"), layout.index("B")) if _is_padded(placed) else None
    strides: dict[str, int] = {}
    stride = 1
    for i, axis in reversed(list(enumerate(layout))):
        if i == padded_axis:
            stride = max(stride, placed.page_size_bytes)
        strides[axis] = fixed.get(axis, stride)
        stride = strides[axis] * shape[axis]
    return (
        (shape["B"], shape["H"], shape["N"], shape["C"]),
        (strides["B"], strides["H"], strides["N"], strides["C"]),
    )


def supported_layouts(
    pool: Sequence[Placed], readers: Iterable[BackendFacts] = (), *, only: KVCacheLayout | None = None
) -> list[KVCacheLayout]:
    """Layouts that a side's pool can have, in the order in which vLLM would take them. Empty: none.

    `readers` are backends of the other side that read this pool too; `only` is a layout that is given already.
    """
    backends = dict.fromkeys((placed.backend.name, placed.backend.layouts) for placed in pool)  # each votes once
    backends |= dict.fromkeys((backend.name, backend.layouts) for backend in readers)
    declared = [layouts for _, layouts in backends if layouts]
    candidates = _in_preference(declared)
    if only is not None:
        candidates = [layout for layout in candidates if layout == only]
    return [layout for layout in candidates if _expresses(layout, pool)]


def _in_preference(declared: list[tuple[KVCacheLayout, ...]]) -> list[KVCacheLayout]:
    if not declared:
        return list(DEFAULT_PREFERENCE)
    if len(set(declared)) == 1:
        return list(declared[0])
    common = set(declared[0]).intersection(*declared[1:])
    votes = Counter(layouts[0] for layouts in declared)
    return sorted(common, key=lambda layout: (-votes[layout], ENUM_ORDER.index(layout)))


def _expresses(layout: KVCacheLayout, pool: Sequence[Placed]) -> bool:
    """Whether pages of different make fit one pool in this layout, and padded ones can be padded."""
    block_compact = set(layout[:2]) == {"L", "B"}
    shapes = {(*placed.page[:2], placed.page_size_bytes) for placed in pool}
    padded = any(_is_padded(placed) or placed.block_stride_bytes != placed.page_size_bytes for placed in pool)
    if (len(shapes) > 1 or padded) and not block_compact:
        return False
    split = any(kernel_block_size(placed, layout) != placed.block_size for placed in pool)
    if split and (padded or layout[:2] != "LB"):
        return False
    mixed_pages = len({placed.page_size_bytes for placed in pool}) > 1
    several_tables = len({placed.table for placed in pool}) > 1
    return not (mixed_pages and several_tables and layout[0] == "L")


def manager_block_sizes(backend: BackendFacts, format: FormatFacts) -> tuple[BlockSize, ...]:
    """Block sizes that the block table may have, from small to large: whole states, and what the kernels take."""
    sizes = backend.kernel_block_sizes
    if _may_split(backend, format):
        sizes = tuple(BlockSize(size=size.size, multiple=True) for size in sizes)
    whole_states = BlockSize(size=max(1, format.tokens_per_state), multiple=True)
    return common_block_sizes(sizes, [whole_states])


def _may_split(backend: BackendFacts, format: FormatFacts) -> bool:
    return backend.splits_blocks and format.tokens_per_state == 1


def common_block_sizes(left: Iterable[BlockSize], right: Iterable[BlockSize]) -> tuple[BlockSize, ...]:
    """Block sizes that both accept, without repetition and from small to large. Empty: none."""
    right = tuple(right)
    found = {common for a in left for b in right if (common := _common(a, b)) is not None}
    return tuple(sorted(found, key=lambda size: (size.size, size.multiple)))


def _common(a: BlockSize, b: BlockSize) -> BlockSize | None:
    if a.multiple and b.multiple:
        return BlockSize(size=math.lcm(a.size, b.size), multiple=True)
    exact, other = (a, b) if not a.multiple else (b, a)
    return exact if other.accepts(exact.size) else None


def choose_block_size(allowed: Sequence[BlockSize], wanted: int) -> int:
    """`wanted` if it is allowed; else the next larger size that is, else the largest."""
    if any(size.accepts(wanted) for size in allowed):
        return wanted
    above = [round_up(wanted, size.size) if size.multiple else size.size for size in allowed]
    return min((size for size in above if size >= wanted), default=max(above))
