"""Two sides' facts in, one contract out: pure, and the same in any process.

The target keeps what it is configured for, and the draft follows it where it can. What differs is in the contract with
its reason; what can't be is refused before a byte is allocated. In order: the pair (`agree`), what each group could
have (`candidates`, `shared`), one combination of that (`settle`), how many blocks (`capacity`), and the figures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cluster.contract.agree import check_pair
from cluster.contract.candidates import private_choices, target_choice
from cluster.contract.capacity import choose_num_blocks
from cluster.contract.choice import Choice
from cluster.contract.contract import Deviation, GroupContract, KVContract, SideContract, WireContract
from cluster.contract.errors import ContractError
from cluster.contract.explain import deviations
from cluster.contract.facts import ConfigWrite, GroupFacts, KVCacheLayout, KVSharing, SideFacts
from cluster.contract.geometry import Placed, blocks_per_request, bytes_per_block, kernel_block_size, view
from cluster.contract.policy import AUTO, Policy
from cluster.contract.settle import Option, Settlement, settle
from cluster.contract.shared import shared_choice


def negotiate(target: SideFacts, draft: SideFacts, policy: Policy) -> KVContract:
    """The contract of a pair.

    Raises:
        ContractError: they can't be run as one pair or, with `policy.strict`, not without a deviation.
    """
    check_pair(target, draft)
    owners = [target_choice(group) for group in _in_order(target.groups)]
    readers = [shared_choice(group, owners, policy) for group in _in_order(draft.groups) if group.role == "target"]
    options = [_options(group, owners, policy) for group in _in_order(draft.groups) if group.role == "draft"]
    sharing = _sharing(target, policy) if readers else None
    settled = settle(owners, readers, options, mirrored=sharing == "mirror")
    if policy.strict and settled.deviations:
        raise _not_strictly(settled.deviations[0])

    per_block = bytes_per_block(settled.target_pool, settled.target_layout)
    per_draft_block = bytes_per_block(settled.draft_pool, settled.draft_layout) if settled.draft_pool else 0
    num_blocks = choose_num_blocks(
        target,
        draft,
        policy,
        target_bytes=per_block,
        draft_bytes=per_draft_block,
        needed=blocks_per_request(
            settled.target_pool, num_tokens=target.max_model_len, max_in_flight_tokens=target.max_in_flight_tokens
        ),
    )
    return KVContract(
        vllm_version=target.vllm_version,
        policy=policy,
        num_blocks=num_blocks,
        enable_prefix_caching=target.enable_prefix_caching,
        enable_chunked_prefill=target.enable_chunked_prefill,
        async_scheduling=target.async_scheduling,
        wire=_wire(target, draft),
        target=_side(target, target.max_model_len, settled.target_layout, per_block),
        draft=_side(draft, min(target.max_model_len, draft.max_model_len), settled.draft_layout, per_draft_block),
        groups=(*_target_groups(settled, num_blocks), *_draft_groups(settled, num_blocks)),
        kv_sharing=sharing,
        deviations=settled.deviations,
    )


def _sharing(target: SideFacts, policy: Policy) -> KVSharing:
    if policy.kv_sharing == AUTO:
        return target.kv_exports[0]
    if policy.kv_sharing in target.kv_exports:
        return policy.kv_sharing
    raise ContractError(
        "kv_sharing",
        target=" or ".join(target.kv_exports),
        draft=policy.kv_sharing,
        reason="the draft reads the target's KV, and over the channel between the two it can't in this way",
        remedy="ask for kv_sharing=auto, or take a channel within one host",
    )


def _in_order(groups: Sequence[GroupFacts]) -> list[GroupFacts]:
    """An engine's order of groups means nothing, so it mustn't reach the digest."""
    return sorted(groups, key=lambda group: group.name)


def _options(group: GroupFacts, owners: Sequence[Choice], policy: Policy) -> list[Option]:
    """What a group of the draft's own may have, best first; with `strict`, only what doesn't deviate."""
    options = [
        Option(choice=choice, deviations=tuple(deviations(choice, reference, policy)))
        for choice, reference in private_choices(group, owners, policy)
    ]
    if not policy.strict:
        return options
    faithful = [option for option in options if not option.deviations]
    if not faithful:
        raise _not_strictly(options[0].deviations[0])
    return faithful


def _not_strictly(deviation: Deviation) -> ContractError:
    return ContractError(
        deviation.field,
        target=deviation.target,
        draft=f"{deviation.draft} for {deviation.group}",
        reason=f"strict allows no deviation, and this one is needed: {deviation.reason}",
        remedy="drop strict, or configure the target with something that both sides can run",
    )


def _wire(target: SideFacts, draft: SideFacts) -> WireContract:
    return WireContract(
        method=target.method,
        num_speculative_tokens=target.num_speculative_tokens,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft.draft_vocab_size,
        tokenizer_digest=target.tokenizer_digest or draft.tokenizer_digest,
        aux_hidden_state_layers=draft.aux_hidden_state_layers,
        hidden_size=draft.wire_hidden_size,
        dtype=draft.wire_dtype,
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
    )


def _side(facts: SideFacts, max_model_len: int, layout: KVCacheLayout, per_block: int) -> SideContract:
    def key(write: ConfigWrite) -> tuple[str, ...]:
        return write.field, write.writer, write.location, write.old, write.new

    return SideContract(
        vllm_build=facts.vllm_build,
        platform=facts.platform,
        compute_capability=facts.compute_capability,
        config_digest=facts.config_digest,
        dtype=facts.dtype,
        quantization=facts.quantization,
        tensor_parallel_size=facts.tensor_parallel_size,
        max_model_len=max_model_len,
        layout=layout,
        bytes_per_block=per_block,
        constructor_writes=tuple(sorted(facts.constructor_writes, key=key)),
    )


def _target_groups(settled: Settlement, num_blocks: int) -> Iterator[GroupContract]:
    read = {choice.mirrors for choice in settled.readers}
    pool = settled.target_pool
    for choice, placed in zip(settled.owners, pool, strict=True):
        group = _group(choice, placed, pool, settled.target_layout, num_blocks)
        yield replace(group, shared=choice.group.name in read)


def _draft_groups(settled: Settlement, num_blocks: int) -> Iterator[GroupContract]:
    pool = settled.draft_pool
    for choice, placed in zip(settled.allocated_by_draft, pool, strict=True):
        group = _group(choice, placed, pool, settled.draft_layout, num_blocks)
        yield replace(group, role="draft", shared=choice in settled.readers)


def _group(
    choice: Choice, placed: Placed, pool: Sequence[Placed], layout: KVCacheLayout, num_blocks: int
) -> GroupContract:
    shape, strides = view(placed, pool, layout, num_blocks)
    return GroupContract(
        name=choice.group.name,
        role=choice.group.role,
        shared=False,
        mirrors=choice.mirrors,
        block_table=choice.target_table,
        layers=tuple(sorted(choice.group.layers)),
        kind=choice.group.kind,
        sliding_window=choice.group.sliding_window,
        attention_backend=choice.backend.name,
        cache_dtype=choice.format.cache_dtype,
        dtype=choice.format.dtype,
        block_size=placed.block_size,
        kernel_block_size=kernel_block_size(placed, layout),
        num_blocks=num_blocks,
        layout=layout,
        shape=shape,
        strides=strides,
        row_bytes=choice.format.row_bytes,
        page_size_bytes=placed.page_size_bytes,
        scales=choice.group.scales,
        index_width=choice.backend.index_width,
    )
