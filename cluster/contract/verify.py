"""What an engine is about to allocate, and what it did allocate, against the contract.

Duck-typed, so that neither torch nor vLLM is needed here: a plan is vLLM's KVCacheConfig with its specs, a tensor has
`dtype`, `shape`, `stride()`, `element_size()`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from cluster.contract.contract import GroupContract, KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.facts import Role


class Spec(Protocol):
    """vLLM's KVCacheSpec of one layer, as far as it is compared."""

    block_size: int

    @property
    def num_heads(self) -> int: ...
    @property
    def num_states(self) -> int: ...
    @property
    def state_content_size_bytes(self) -> int: ...
    @property
    def page_size_bytes(self) -> int: ...


class PlannedGroup(Protocol):
    layer_names: list[str]
    kv_cache_spec: Spec


class PlannedTensor(Protocol):
    """vLLM's KVCacheTensor: where the pages of some layers lie in the one pool."""

    size: int
    layers: list[str]
    layer_stride: int
    offset: int


class Plan(Protocol):
    """vLLM's KVCacheConfig, as far as it is compared."""

    num_blocks: int
    kv_cache_layout: str | None
    kv_cache_groups: list[PlannedGroup]
    kv_cache_tensors: list[PlannedTensor]


class Tensor(Protocol):
    @property
    def dtype(self) -> object: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


def verify_plan(contract: KVContract, role: Role, plan: Plan) -> None:
    """Check a KVCacheConfig on entry to `initialize_from_config`, before a byte is allocated.

    Raises:
        ContractViolation: with the first thing that isn't as the contract has it.
    """
    _same("num_blocks", contract.num_blocks, plan.num_blocks, "the plan has another number of blocks")
    layout = contract.side(role).layout
    _same("kv_cache_layout", layout, plan.kv_cache_layout, "the plan has another layout")
    specs = dict(_specs(plan))
    _same_layers(contract, role, specs)
    for group in contract.groups_of(role):
        for layer in group.layers:
            _verify_spec(group, layer, specs[layer])
    _verify_places(contract, role, plan.kv_cache_tensors)


def verify_allocation(
    contract: KVContract, role: Role, tensors: Mapping[str, Tensor], *, cache_dtype: str | None = None
) -> None:
    """Check the tensors that were allocated, one a layer, as vLLM's `init_kv_cache` returns them.

    Args:
        cache_dtype: the word in the engine's config now, for the message.

    Raises:
        ContractViolation: with both geometries.
    """
    groups = contract.groups_of(role)
    own = {id(tensors[layer]) for group in groups for layer in group.layers if layer in tensors}
    known = {layer for group in groups for layer in group.layers}
    # Layers that share another layer's KV inside one model (YOCO) are listed with that layer's tensor.
    _same_layers(contract, role, {name: t for name, t in tensors.items() if name in known or id(t) not in own})
    for group in groups:
        for layer in group.layers:
            _verify_tensor(group, layer, tensors[layer], cache_dtype)


def _specs(plan: Plan) -> Iterator[tuple[str, Spec]]:
    """The spec of each layer: a group's own, or one a layer (UniformTypeKVCacheSpecs)."""
    for group in plan.kv_cache_groups:
        each: Mapping[str, Spec] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            yield layer, each[layer] if each is not None else group.kv_cache_spec


def _same_layers(contract: KVContract, role: Role, found: Mapping[str, object]) -> None:
    expected = {layer for group in contract.groups_of(role) for layer in group.layers}
    if missing := sorted(expected - set(found)):
        raise ContractViolation("layers", old=missing, new="nothing", reason="layers of the contract got no KV cache")
    if extra := sorted(set(found) - expected):
        raise ContractViolation("layers", old="nothing", new=extra, reason="KV cache for layers outside the contract")


def _verify_spec(group: GroupContract, layer: str, spec: Spec) -> None:
    where = f"{layer} ({group.name})"
    _same(f"block_size of {where}", group.block_size, spec.block_size, "the plan has blocks of another size")
    row_bytes = spec.num_heads * spec.state_content_size_bytes
    word = getattr(spec, "cache_dtype_str", None)
    _same_rows(group, where, row_bytes, word or _dtype(getattr(spec, "dtype", None)), "allocated by this plan")
    _same(f"page_size_bytes of {where}", group.page_size_bytes, spec.page_size_bytes, "the plan has other pages")
    _, heads, states, _ = group.shape
    states *= group.block_size // group.kernel_block_size
    page = (spec.num_heads, spec.num_states)
    _same(f"heads and states a page of {where}", (heads, states), page, "the plan has other pages")


def _verify_places(contract: KVContract, role: Role, tensors: Sequence[PlannedTensor]) -> None:
    """The pool's size, and that layers on one block table, where one id is in use in all, lie apart.

    vLLM overlays its groups, because there a block id belongs to one of them. Two groups of a hosted draft may mirror
    one table of the target.
    """
    groups = {layer: group for group in contract.groups_of(role) for layer in group.layers}
    places: dict[str, list[tuple[int, int, str]]] = {}
    for tensor in tensors:
        _same("size of the pool", contract.pool_bytes(role), tensor.size, "the plan has another size")
        for i, layer in enumerate(tensor.layers):
            start = tensor.offset + i * tensor.layer_stride
            # To the next layer: past its page, where a block holds one of each, or else past all of its blocks.
            places.setdefault(groups[layer].block_table, []).append((start, start + tensor.layer_stride, layer))
    for table, taken in places.items():
        for (_, end, layer), (start, _, other) in pairwise(sorted(taken)):
            if start < end:
                raise ContractViolation(
                    f"place of {other}",
                    old=f"from byte {end}",
                    new=f"from byte {start}",
                    reason=f"it overlays {layer}, though both are addressed by block table {table}",
                )


def _verify_tensor(group: GroupContract, layer: str, tensor: Tensor, cache_dtype: str | None) -> None:
    where = f"{layer} ({group.name})"
    size = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) == 3 and group.shape[1] == 1:  # MLA layers bind [B, N, C]
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], group.strides[1] // size, *strides[1:])
    if len(shape) != 4:
        _same(f"shape of {where}", group.shape, shape, "it isn't [B, H, N, C]")
    in_bytes = (*shape[:3], shape[3] * size)
    word = cache_dtype or _dtype(tensor.dtype)
    _same_rows(group, where, in_bytes[1] * in_bytes[3], word, "allocated")
    _same(f"dtype of {where}", group.dtype, _dtype(tensor.dtype), "the tensor is of another dtype")
    _same(f"number of blocks of {where}", group.shape[0], shape[0], "the pool has another number of blocks")
    _same(f"shape of {where}, in bytes", group.shape, in_bytes, "the tensor has another shape")
    found = tuple(stride * size for stride in strides)
    # The stride of an axis of one is never used, and torch may give it any value.
    used = tuple(want if length == 1 else have for want, have, length in zip(group.strides, found, shape, strict=True))
    expected = (*group.strides[:3], size)
    _same(f"strides of {where}, in bytes", expected, (*used[:3], found[3]), f"the tensor isn't {group.layout}")


def _same_rows(group: GroupContract, where: str, row_bytes: int, word: str, what: str) -> None:
    """The one that vLLM #52288 is about, said in a user's terms."""
    if row_bytes == group.row_bytes:
        return
    unit = "token" if group.shape[2] == group.kernel_block_size else "state"
    raise ContractViolation(
        f"row_bytes of {where}",
        old=group.row_bytes,
        new=row_bytes,
        reason=f"{row_bytes} bytes a {unit} {what}, {group.row_bytes} expected ({word} against {group.cache_dtype})",
    )


def _same(field: str, expected: object, found: object, reason: str) -> None:
    if expected != found:
        raise ContractViolation(field, old=expected, new=found, reason=reason)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
