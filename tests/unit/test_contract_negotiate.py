"""The rule of negotiation: the draft follows the target where it can, and one block space holds them both."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.contract.contract import GroupContract
from cluster.contract.errors import ContractError
from cluster.contract.facts import BackendFacts, BlockSize, GroupFacts, KVCacheLayout
from cluster.contract.memory import plan_memory
from tests.unit.test_contract_pairs import (
    GIB,
    Pair,
    backend,
    cannot,
    contract_of,
    format,
    gemma_4_mtp,
    group,
    qwen3_8b,
    side,
)

MULTIPLE_OF_64 = (BlockSize(size=64, multiple=True),)


def pair_of(target: GroupFacts, *drafts: GroupFacts) -> Pair:
    return side("target", target), side("draft", *drafts)


def draft_of(pair: Pair, **policy: Any) -> GroupContract:
    (draft,) = contract_of(pair, **policy).groups_of("draft")
    return draft


# Words


def test_inherit_takes_the_targets_backend_although_the_draft_prefers_another() -> None:
    assert draft_of(qwen3_8b()).attention_backend == "FLASH_ATTN"
    assert contract_of(qwen3_8b(), strict=True).deviations == ()


def test_inherit_takes_the_targets_dtype_although_the_draft_prefers_another() -> None:
    target = group("full", "target", backend("A", format("fp8", 2048)))
    draft = group("draft", "draft", backend("A", format("auto"), format("fp8", 2048)), layers=5)
    assert draft_of(pair_of(target, draft)).cache_dtype == "fp8"


def test_auto_takes_the_drafts_first_choice_and_says_that_it_differs() -> None:
    contract = contract_of(qwen3_8b(), attention_backend="auto")
    assert contract.groups_of("draft")[0].attention_backend == "FLASHINFER"
    assert [deviation.reason for deviation in contract.deviations] == ["asked for by attention_backend=auto"]


def test_a_name_that_is_the_targets_is_no_deviation() -> None:
    assert contract_of(qwen3_8b(), attention_backend="FLASH_ATTN", kv_cache_dtype="auto", strict=True).deviations == ()


def test_the_same_backend_in_another_dtype_comes_before_another_backend_in_the_same() -> None:
    target = group("full", "target", backend("A", format("fp8", 2048)))
    draft = group("draft", "draft", backend("B", format("fp8", 2048)), backend("A", format("auto")), layers=5)
    assert draft_of(pair_of(target, draft)).attention_backend == "A"


def test_a_dtype_that_was_asked_for_may_need_another_backend() -> None:
    target = group("full", "target", backend("A"))
    draft = group("draft", "draft", backend("A"), backend("B", format("fp8", 2048)), layers=5)
    contract = contract_of(pair_of(target, draft), kv_cache_dtype="fp8")
    reasons = {deviation.field: deviation.reason for deviation in contract.deviations}
    assert reasons["attention_backend"] == "A runs auto here, not fp8"


def test_auto_and_bfloat16_are_one_dtype_for_a_bfloat16_model() -> None:
    target = group("full", "target", backend("A", format("auto")))
    draft = group("draft", "draft", backend("A", format("bfloat16")), layers=5)
    assert contract_of(pair_of(target, draft), strict=True).deviations == ()


def test_strict_refuses_what_was_asked_for_if_it_differs() -> None:
    with pytest.raises(ContractError, match="strict allows no deviation"):
        contract_of(qwen3_8b(), attention_backend="FLASHINFER", strict=True)


# Block sizes


def test_the_targets_block_size_stands_where_the_draft_takes_it() -> None:
    target = group("full", "target", backend("A"), block_size=32)
    draft = group("draft", "draft", backend("A"), layers=5, block_size=16)
    assert draft_of(pair_of(target, draft)).block_size == 32


def test_a_draft_that_needs_larger_blocks_moves_both_sides_and_the_contract_says_so() -> None:
    target = group("full", "target", backend("A"), block_size=16)
    draft = group("draft", "draft", backend("A", sizes=MULTIPLE_OF_64), layers=5)
    contract = contract_of(pair_of(target, draft))
    assert {group.block_size for group in contract.groups} == {64}
    assert [(d.field, d.target, d.draft) for d in contract.deviations] == [("block_size", "16", "64")]
    with pytest.raises(ContractError, match="strict"):
        contract_of(pair_of(target, draft), strict=True)


def test_a_draft_backend_is_passed_over_for_its_block_size_if_another_fits() -> None:
    target = group("full", "target", backend("A", sizes=(BlockSize(size=64),)), block_size=64)
    draft = group("draft", "draft", backend("B", sizes=(BlockSize(size=16),)), backend("C"), layers=5)
    assert draft_of(pair_of(target, draft)).attention_backend == "C"


def test_a_choice_is_taken_back_if_a_later_group_has_no_block_size_in_common_with_it() -> None:
    target = group("full", "target", backend("A"), block_size=64)
    first = group("d0", "draft", backend("B", sizes=MULTIPLE_OF_64), backend("C"), layers=3)
    second = group("d1", "draft", backend("B", sizes=(BlockSize(size=16),)), layers=2)
    chosen = {group.name: group for group in contract_of(pair_of(target, first, second)).groups_of("draft")}
    assert (chosen["d0"].attention_backend, chosen["d0"].block_size) == ("C", 16)


def test_a_block_holds_whole_states_of_a_compressed_cache() -> None:
    target = group(
        "c", "target", backend("A", format("auto", tokens_per_state=128)), kind="mla_attention", block_size=64
    )
    draft = group("draft", "draft", backend("A"), layers=5)
    contract = contract_of(pair_of(target, draft))
    assert {group.block_size for group in contract.groups} == {128}
    assert contract.group("target", "c").shape[2] == 1


def test_a_target_whose_own_groups_have_no_block_size_in_common_is_refused() -> None:
    owners = [
        group(name, "target", backend("A", sizes=(BlockSize(size=size),)), block_table="one")
        for name, size in (("g0", 16), ("g1", 64))
    ]
    with pytest.raises(ContractError) as refusal:
        contract_of((side("target", *owners), side("draft", group("draft", "draft", backend("A")))))
    assert (refusal.value.field, refusal.value.draft) == ("block_size", None)


def test_a_block_that_has_to_be_split_is_seen_by_the_kernel_in_pieces() -> None:
    sizes = tuple(BlockSize(size=size) for size in (16, 32, 64))
    target = group("full", "target", backend("A"), block_size=128)
    draft = group("draft", "draft", backend("B", sizes=sizes, splits_blocks=True), layers=5)
    contract = contract_of(pair_of(target, draft))
    (split,) = contract.groups_of("draft")
    assert (split.block_size, split.kernel_block_size) == (128, 64)
    assert split.shape == (2 * contract.num_blocks, 8, 64, 512)
    whole = replace(draft, backends=(backend("B", sizes=sizes),))
    with pytest.raises(ContractError, match="block_size"):
        contract_of(pair_of(replace(target, backends=(backend("A", sizes=(BlockSize(size=128),)),)), whole))


# Which table of the target addresses a group of the draft


def windows(*sizes: int | None) -> tuple[GroupFacts, ...]:
    return tuple(
        group(f"g{i}", "target", backend("A"), kind="sliding_window" if size else "full_attention", sliding_window=size)
        for i, size in enumerate(sizes)
    )


@pytest.mark.parametrize(
    ("of_target", "of_draft", "mirrored"),
    [
        ((None, 1024), None, "g0"),
        ((1024, None), None, "g1"),
        ((None, 1024), 1024, "g1"),  # the most alike
        ((None, 2048), 1024, "g0"),  # a full table keeps every block
        ((4096, 2048), 1024, "g1"),  # the tightest that keeps enough
    ],
)
def test_a_draft_group_lies_on_a_table_that_keeps_the_blocks_it_attends_to(
    of_target: tuple[int | None, ...], of_draft: int | None, mirrored: str
) -> None:
    kind = "sliding_window" if of_draft else "full_attention"
    draft = group("draft", "draft", backend("A"), layers=5, kind=kind, sliding_window=of_draft)
    pair = side("target", *windows(*of_target)), side("draft", draft)
    assert draft_of(pair).mirrors == mirrored


def test_a_draft_that_attends_further_than_the_target_keeps_blocks_is_refused() -> None:
    draft = group("draft", "draft", backend("A"), layers=5)
    with pytest.raises(ContractError) as refusal:
        contract_of((side("target", *windows(1024)), side("draft", draft)))
    assert refusal.value.field == "sliding_window"


def test_two_draft_groups_on_one_table_lie_side_by_side_because_they_use_the_same_ids() -> None:
    full = group("d0", "draft", backend("A"), layers=1)
    window = group("d1", "draft", backend("A"), layers=3, kind="sliding_window", sliding_window=512)
    contract = contract_of(pair_of(group("full", "target", backend("A")), full, window))
    assert {group.block_table for group in contract.groups_of("draft")} == {"full"}
    assert contract.draft.bytes_per_block == 4 * 65_536


def test_draft_groups_on_one_table_stay_on_one_table_of_the_target() -> None:
    target = side("target", *windows(None, 1024))
    full = group("d0", "draft", backend("A"), layers=1, block_table="d")
    window = group("d1", "draft", backend("A"), layers=3, kind="sliding_window", sliding_window=1024, block_table="d")
    contract = contract_of((target, side("draft", full, window)))
    assert {group.mirrors for group in contract.groups_of("draft")} == {"g0"}
    # Apart, each lies on the table that is most like it.
    contract = contract_of((target, side("draft", full, replace(window, block_table=None))))
    assert {group.mirrors for group in contract.groups_of("draft")} == {"g0", "g1"}


def test_draft_groups_on_one_table_that_need_two_of_the_target_are_refused() -> None:
    large = backend("A", sizes=(BlockSize(size=64),))
    owners = (
        group("g0", "target", backend("A"), block_size=16),
        group("g1", "target", large, block_size=64, kind="sliding_window", sliding_window=1024),
    )
    full = group("d0", "draft", backend("A", sizes=(BlockSize(size=16),)), layers=1, block_table="d")
    window = group("d1", "draft", large, layers=1, kind="sliding_window", sliding_window=1024, block_table="d")
    with pytest.raises(ContractError) as refusal:
        contract_of((side("target", *owners), side("draft", full, window)))
    assert (refusal.value.field, refusal.value.target) == ("block_table", "g0 and g1")


def test_two_target_groups_with_tables_of_their_own_overlay_each_other() -> None:
    draft = group("draft", "draft", backend("A"), layers=5)
    contract = contract_of((side("target", *windows(None, 1024)), side("draft", draft)))
    assert contract.target.bytes_per_block == 36 * 65_536


# Layouts


def with_layouts(*layouts: KVCacheLayout, name: str = "A") -> BackendFacts:
    return backend(name, layouts=layouts)


def test_private_pools_may_have_different_layouts() -> None:
    """vLLM #55312: in one engine, this pair has no layout at all."""
    target = group("full", "target", with_layouts("LBNHC", name="FLEX_ATTENTION"))
    draft = group("draft", "draft", with_layouts("LBHNC", "BLHNC", name="B12X"), layers=5)
    contract = contract_of(pair_of(target, draft))
    assert (contract.target.layout, contract.draft.layout) == ("LBNHC", "LBHNC")


def test_a_draft_that_reads_the_targets_cache_has_the_targets_layout_in_its_own_pool_too() -> None:
    target = group("full", "target", with_layouts("LBHNC", "BLHNC"))
    reads = replace(target, layers=target.layers[-1:])
    own = group("own", "draft", with_layouts("BLHNC", "LBNHC", name="B"), with_layouts("LBNHC", name="A"), layers=2)
    contract = contract_of((side("target", target), side("draft", reads, own)))
    assert (contract.target.layout, contract.draft.layout) == ("BLHNC", "BLHNC")
    other = replace(own, backends=(with_layouts("LBNHC", name="B"),))
    with pytest.raises(ContractError) as refusal:
        contract_of((side("target", target), side("draft", reads, other)))
    assert (refusal.value.field, refusal.value.target) == ("kv_cache_layout", "LBHNC/BLHNC")


def layout_of_target(*groups: GroupFacts) -> KVCacheLayout:
    draft = group("draft", "draft", backend("A"), kind="sliding_window", sliding_window=16, layers=1)
    return contract_of((side("target", *groups), side("draft", draft))).target.layout


def test_padded_pages_need_a_layout_in_which_a_page_is_in_one_piece() -> None:
    def padded(alignment: int) -> GroupFacts:
        page = format("auto", page_alignment=alignment)
        return group("full", "target", backend("A", page, layouts=("LHBNC", "LBHNC")))

    assert layout_of_target(padded(1)) == "LHBNC"
    assert layout_of_target(padded(1000)) == "LBHNC"


def test_blocks_that_are_split_need_a_layout_in_which_they_lie_together() -> None:
    sizes = (BlockSize(size=16),)
    kernels = backend("A", sizes=sizes, splits_blocks=True, layouts=("LHBNC", "LBHNC"))
    assert layout_of_target(group("full", "target", kernels, block_size=16)) == "LHBNC"
    assert layout_of_target(group("full", "target", kernels, block_size=64)) == "LBHNC"


def test_tables_with_pages_of_unlike_size_need_blocks_outermost() -> None:
    small = backend("A", format("auto", 2048), layouts=("LBHNC", "BLHNC"))
    large = backend("A", format("auto", 4096), layouts=("LBHNC", "BLHNC"))
    pages = group("g0", "target", small), group("g1", "target", large)
    assert layout_of_target(*pages) == "BLHNC"
    assert layout_of_target(*(replace(each, block_table="one") for each in pages)) == "LBHNC"


def test_the_layout_decides_the_strides() -> None:
    def strides(layout: KVCacheLayout) -> tuple[int, ...]:
        target = group("full", "target", with_layouts(layout), layers=2)
        draft = group("draft", "draft", backend("A"), layers=5)
        return contract_of(pair_of(target, draft)).group("target", "full").strides

    assert strides("LBHNC") == (65_536, 8192, 512, 1)
    assert strides("LBNHC") == (65_536, 512, 4096, 1)
    assert strides("BLHNC") == (2 * 65_536, 8192, 512, 1)


# Groups that both sides read


def mtp_with(**more: Any) -> Pair:
    """Gemma 4's MTP, with the draft's reading of the full group changed."""
    target, draft = gemma_4_mtp()
    full, window = draft.groups
    return target, replace(draft, groups=(replace(full, **more), window))


def test_a_shared_group_is_in_the_contract_once_and_marked() -> None:
    contract = contract_of(gemma_4_mtp(), strict=True)
    assert [(group.name, group.role, group.shared) for group in contract.groups] == [
        ("full", "target", True),
        ("sliding", "target", True),
    ]
    assert contract.draft.bytes_per_block == 0
    assert contract.draft.layout == contract.target.layout


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"backends": (backend("FLASH_ATTN"),)}, "attention_backend"),
        ({"backends": ()}, "attention_backend"),
        ({"backends": (backend("TRITON_ATTN", format("fp8", 2048)),)}, "cache_dtype"),
        ({"backends": (backend("TRITON_ATTN", format("auto", 2048)),)}, "row_bytes"),
        ({"backends": (backend("TRITON_ATTN", format("auto", heads=4)),)}, "num_heads"),
        ({"backends": (backend("TRITON_ATTN", format("auto", page_alignment=576)),)}, "page_alignment"),
        ({"backends": (backend("TRITON_ATTN", sizes=(BlockSize(size=5),)),)}, "block_size"),
        ({"scales": "checkpoint:9f2c"}, "scales"),
        ({"head_size": 256}, "head_size"),
        ({"layers": ("model.layers.99.self_attn.attn",)}, "layers"),
    ],
)
def test_a_group_that_both_sides_read_agrees_in_everything_or_is_refused(change: Any, field: str) -> None:
    with pytest.raises(ContractError) as refusal:
        contract_of(mtp_with(**change))
    assert refusal.value.field == field


def test_a_mirror_is_the_drafts_own_memory_in_the_targets_format() -> None:
    contract = contract_of(gemma_4_mtp(), kv_sharing="mirror")
    mapped = contract_of(gemma_4_mtp())
    assert (contract.kv_sharing, mapped.kv_sharing) == ("mirror", "map")
    assert contract.groups_of("target") == mapped.groups_of("target")
    assert contract.groups_of_draft_layers == contract.mirrors == contract.groups_of("draft")
    assert mapped.groups_of_draft_layers == mapped.groups_of("target")
    for mirror in contract.mirrors:
        owner = contract.group("target", mirror.mirrors)
        for field in ("attention_backend", "dtype", "block_size", "num_blocks", "layout", "row_bytes", "block_table"):
            assert getattr(mirror, field) == getattr(owner, field)
    assert 0 < contract.draft.bytes_per_block < contract.target.bytes_per_block
    assert contract.digest != mapped.digest


def test_a_channel_between_hosts_can_only_mirror() -> None:
    target, draft = gemma_4_mtp()
    pair = replace(target, kv_exports=("mirror",)), draft
    assert contract_of(pair).kv_sharing == "mirror"
    with pytest.raises(ContractError) as refusal:
        contract_of(pair, kv_sharing="map")
    assert refusal.value.field == "kv_sharing"


def test_a_pair_whose_draft_keeps_its_own_kv_shares_none() -> None:
    assert contract_of(qwen3_8b(), kv_sharing="map").kv_sharing is None


def test_a_shared_group_is_refused_with_vllms_reasons() -> None:
    why = cannot("TRITON_ATTN", "head_size not supported")
    with pytest.raises(ContractError, match="head_size not supported"):
        contract_of(mtp_with(backends=(), infeasible=(why,)))


def test_a_reader_that_knows_another_layout_only_is_refused() -> None:
    target, draft = mtp_with(backends=(with_layouts("LHBNC", name="TRITON_ATTN"),))
    full, window = target.groups
    owner = replace(full, backends=(with_layouts("LBNHC", name="TRITON_ATTN"),))
    with pytest.raises(ContractError) as refusal:
        contract_of((replace(target, groups=(owner, window)), draft))
    assert refusal.value.field == "kv_cache_layout"


@pytest.mark.parametrize("policy", [{"attention_backend": "FLASH_ATTN"}, {"kv_cache_dtype": "fp8"}])
def test_nobody_can_ask_for_another_backend_or_dtype_in_a_shared_group(policy: Any) -> None:
    with pytest.raises(ContractError, match="reads this group of the target"):
        contract_of(gemma_4_mtp(), **policy)


# Numbers


def test_a_number_of_blocks_that_was_asked_for_is_in_the_contract() -> None:
    contract = contract_of(qwen3_8b(), num_gpu_blocks=4000)
    assert {group.num_blocks for group in contract.groups} == {contract.num_blocks} == {4000}


def test_a_shorter_draft_limits_itself_and_not_the_target() -> None:
    target, draft = qwen3_8b()
    contract = contract_of((target, replace(draft, max_model_len=4096)))
    assert (contract.target.max_model_len, contract.draft.max_model_len) == (40_960, 4096)


def test_every_number_that_buffers_are_sized_by_is_the_targets() -> None:
    target, draft = qwen3_8b()
    wire = contract_of((target, replace(draft, max_num_seqs=512, max_num_batched_tokens=16_384))).wire
    assert (wire.max_num_seqs, wire.max_num_batched_tokens) == (256, 8192)


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_draft_with_smaller_buffers_than_a_round_needs_is_refused(field: str) -> None:
    target, draft = qwen3_8b()
    with pytest.raises(ContractError) as refused:
        contract_of((target, replace(draft, **{field: 8})))
    assert (refused.value.field, refused.value.draft) == (field, "8")


def test_the_memory_plan_says_what_the_draft_costs_its_target() -> None:
    pair = qwen3_8b()
    plan = plan_memory(*pair, contract_of(pair), gpu_bytes=72 * GIB)
    per_token = 36 * 4096
    assert plan.target_kv_bytes_per_token == per_token
    assert plan.draft_kv_bytes_per_token == 5 * 4096
    assert plan.colocated_tokens == (72 - 16 - 2) * GIB // (per_token + 5 * 4096)
    assert plan.separate_tokens == (56 * GIB - 5 * 4096 * 4096 * 2) // per_token
    assert not plan.draft_limits
    assert str(plan) == (
        "the draft costs the target 2.0 GiB of weights and 12 % of its KV: "
        f"{plan.tokens_gained:,} tokens more without it"
    )


def test_a_small_gpu_for_the_draft_limits_the_tokens_of_both() -> None:
    pair = qwen3_8b()
    plan = plan_memory(*pair, contract_of(pair), gpu_bytes=72 * GIB, draft_gpu_bytes=8 * GIB)
    assert plan.draft_limits
    assert plan.separate_tokens == 4 * GIB // (5 * 4096)


def test_a_gpu_that_cannot_hold_the_weights_holds_no_tokens() -> None:
    pair = qwen3_8b()
    assert plan_memory(*pair, contract_of(pair), gpu_bytes=GIB).separate_tokens == 0
