"""Faults that users met with vLLM, each refused or settled before anything is allocated."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.contract.errors import ContractError
from cluster.contract.facts import BlockSize, QuantizationFacts, SideFacts
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from tests.unit.test_contract_pairs import (
    DSV4_WRITE,
    GIB,
    Pair,
    backend,
    cannot,
    contract_of,
    deepseek_v4,
    format,
    gemma_4_dflash,
    glm_5_2,
    group,
    kimi,
    qwen3_8b,
    side,
)


def refused(pair: Pair, **policy: Any) -> ContractError:
    with pytest.raises(ContractError) as refusal:
        contract_of(pair, **policy)
    error = refusal.value
    assert "\n" not in str(error)
    assert all((error.field, error.reason, error.remedy))
    return error


def deviating(pair: Pair, **policy: Any) -> dict[str, str]:
    return {deviation.field: deviation.reason for deviation in contract_of(pair, **policy).deviations}


def changed(facts: SideFacts, **more: Any) -> SideFacts:
    return replace(facts, **more)


def with_backend(facts: SideFacts, **more: Any) -> SideFacts:
    """The same side with its only group's first backend changed."""
    (only,) = facts.groups
    return replace(facts, groups=(replace(only, backends=(replace(only.backends[0], **more), *only.backends[1:])),))


# vLLM #52288: `None` for the draft's backend selected again, and that class rewrote the shared cache_config.


def test_a_draft_inherits_the_targets_backend_instead_of_selecting_one_that_rewrites_the_config() -> None:
    contract = contract_of(deepseek_v4())
    (draft,) = contract.groups_of("draft")
    assert (draft.attention_backend, draft.cache_dtype, draft.row_bytes) == ("FLASHINFER_MLA_SPARSE_DSV4", "fp8", 512)
    assert contract.deviations == ()


def test_the_write_that_would_have_damaged_a_shared_config_is_on_record() -> None:
    assert contract_of(deepseek_v4()).draft.constructor_writes == (DSV4_WRITE,)


def test_a_cache_that_is_allocated_wider_than_it_is_read_is_refused_with_both_widths() -> None:
    target, draft = deepseek_v4()
    torn = format("fp8_ds_mla", 584, heads=1, read_cache_dtype="auto", read_row_bytes=512)
    error = refused((with_backend(target, formats=(torn,)), draft))
    assert error.field == "row_bytes"
    assert "584 bytes a token allocated, 512 expected (fp8_ds_mla against auto)" in str(error)


def test_a_cache_of_equal_width_but_another_format_is_refused_too() -> None:
    target, draft = deepseek_v4()
    torn = format("fp8", 512, heads=1, read_cache_dtype="nvfp4_ds_mla")
    assert refused((with_backend(target, formats=(torn,)), draft)).field == "cache_dtype"


def test_two_words_for_one_format_are_no_difference() -> None:
    target, draft = deepseek_v4()
    alias = format("fp8", 512, heads=1, dtype="float8_e4m3fn", read_cache_dtype="fp8_e4m3")
    assert contract_of((with_backend(target, formats=(alias,)), draft)).deviations == ()


def test_an_explicit_backend_for_the_draft_wins_and_its_own_pool_keeps_the_row_that_it_reads() -> None:
    pair = deepseek_v4()
    contract = contract_of(pair, attention_backend="FLASHMLA_SPARSE_DSV4", kv_cache_dtype="auto")
    (target,), (draft,) = contract.groups_of("target"), contract.groups_of("draft")
    assert (target.row_bytes, draft.row_bytes) == (512, 584)
    assert [deviation.field for deviation in contract.deviations] == ["attention_backend", "cache_dtype"]
    assert (
        "asked for by attention_backend=FLASHMLA_SPARSE_DSV4"
        in deviating(pair, attention_backend="FLASHMLA_SPARSE_DSV4").values()
    )


def test_auto_selects_again_which_is_safe_once_each_side_has_a_config_of_its_own() -> None:
    contract = contract_of(deepseek_v4(), attention_backend="auto")
    assert contract.groups_of("draft")[0].attention_backend == "FLASHMLA_SPARSE_DSV4"


def test_a_draft_that_differs_on_purpose_is_not_forced_onto_the_targets_backend() -> None:
    assert deviating(kimi()) == {
        "attention_backend": "FLASHINFER_MLA can't run it: non-MLA not supported, sliding window not supported"
    }


def test_strict_refuses_the_same_draft_and_says_why_it_differs() -> None:
    error = refused(kimi(), strict=True)
    assert (error.field, error.target, error.draft) == (
        "attention_backend",
        "FLASHINFER_MLA",
        "FLASH_ATTN for draft",
    )
    assert "sliding window not supported" in error.reason


# vLLM #48380: the draft inherits a cache dtype that no dense backend has.


def test_a_dense_draft_of_an_mla_target_gets_a_dtype_that_its_backend_runs() -> None:
    contract = contract_of(glm_5_2())
    (draft,) = contract.groups_of("draft")
    assert (draft.attention_backend, draft.cache_dtype, draft.dtype) == ("FLASH_ATTN", "auto", "bfloat16")
    assert deviating(glm_5_2())["cache_dtype"] == "FLASH_ATTN runs auto, bfloat16 here, not fp8_ds_mla"


def test_asking_for_a_dtype_that_no_backend_of_the_draft_runs_is_refused_with_what_they_do_run() -> None:
    error = refused(glm_5_2(), kv_cache_dtype="fp8_ds_mla")
    assert (error.field, error.draft) == ("kv_cache_dtype", "fp8_ds_mla for draft")
    assert "FLASH_ATTN in auto, bfloat16" in error.reason


def test_a_draft_that_no_backend_runs_is_refused_with_every_backends_reasons() -> None:
    target, draft = glm_5_2()
    (only,) = draft.groups
    stranded = replace(
        only, backends=(), infeasible=(cannot("FLASH_ATTN", "head_size not supported"), *only.infeasible)
    )
    error = refused((target, changed(draft, groups=(stranded,))))
    assert error.field == "attention_backend"
    assert "FLASH_ATTN: head_size not supported" in error.reason
    assert "TURBOQUANT: kv_cache_dtype not supported, non-causal attention not supported" in error.reason


# vLLM #49133 and #51758: whose quantisation the draft is loaded with.


def test_an_unquantised_draft_of_a_quantised_target_stays_unquantised() -> None:
    target, draft = qwen3_8b()
    quantised = changed(target, quantization=QuantizationFacts(method="modelopt_fp4", checkpoint="modelopt_fp4"))
    contract = contract_of((quantised, draft), strict=True)
    assert contract.target.quantization.method == "modelopt_fp4"
    assert contract.draft.quantization.method is None


def test_a_draft_that_takes_its_targets_quantisation_for_its_own_is_refused() -> None:
    target, draft = qwen3_8b()
    nvfp4 = QuantizationFacts(method="modelopt_fp4", checkpoint="modelopt_fp4")
    borrowed = QuantizationFacts(method="modelopt_fp4", checkpoint="mxfp4", source="target")
    error = refused((changed(target, quantization=nvfp4), changed(draft, quantization=borrowed)))
    assert (error.field, error.target) == ("quantization", "modelopt_fp4")
    assert error.draft == "modelopt_fp4, where its checkpoint declares mxfp4"


def test_a_draft_quantisation_read_from_the_targets_config_is_refused() -> None:
    target, draft = deepseek_v4()
    misread = QuantizationFacts(method="fp8", checkpoint="deepseek_v4_fp8", source="target")
    own = QuantizationFacts(method="deepseek_v4_fp8", checkpoint="deepseek_v4_fp8")
    target = changed(target, quantization=own)
    assert refused((target, changed(draft, quantization=misread))).field == "quantization"
    assert contract_of((target, changed(draft, quantization=own))).draft.quantization == own


def test_a_quantisation_that_the_user_chose_for_the_draft_stands() -> None:
    target, draft = qwen3_8b()
    chosen = QuantizationFacts(method="fp8", checkpoint=None, source="user")
    assert contract_of((target, changed(draft, quantization=chosen))).draft.quantization == chosen


# vLLM #51042: sparse index tables that are built wider than they are read.


def narrow_index(facts: SideFacts, name: str, read: tuple[int, ...]) -> SideFacts:
    (only,) = facts.groups
    backends = tuple(
        replace(b, index_width=256, index_widths_read=read) if b.name == name else b for b in only.backends
    )
    return replace(facts, groups=(replace(only, backends=backends),))


def test_a_backend_that_misreads_the_drafts_index_table_is_passed_over() -> None:
    target, draft = deepseek_v4()
    pair = target, narrow_index(draft, "FLASHINFER_MLA_SPARSE_DSV4", (128,))
    assert contract_of(pair).groups_of("draft")[0].attention_backend == "FLASHMLA_SPARSE_DSV4"
    assert "256 indices a token built, 128 read" in deviating(pair)["attention_backend"]


def test_a_backend_that_misreads_the_index_table_is_refused_when_asked_for() -> None:
    target, draft = deepseek_v4()
    pair = target, narrow_index(draft, "FLASHINFER_MLA_SPARSE_DSV4", (128, 512))
    error = refused(pair, attention_backend="FLASHINFER_MLA_SPARSE_DSV4")
    assert error.field == "index_width"
    assert "256 indices a token built, 128 or 512 read" in str(error)


def test_an_index_table_of_a_width_that_is_read_is_in_the_contract() -> None:
    target, draft = deepseek_v4()
    pair = target, narrow_index(draft, "FLASHINFER_MLA_SPARSE_DSV4", (128, 256))
    assert contract_of(pair).groups_of("draft")[0].index_width == 256


# vLLM #54690: the draft in FP8, the target in auto.


def test_an_fp8_draft_beside_a_target_in_auto_is_settled_with_each_dtype_resolved() -> None:
    contract = contract_of(qwen3_8b(), kv_cache_dtype="fp8")
    (target,), (draft,) = contract.groups_of("target"), contract.groups_of("draft")
    assert (target.cache_dtype, target.dtype, target.row_bytes) == ("auto", "bfloat16", 4096)
    assert (draft.cache_dtype, draft.dtype, draft.row_bytes) == ("fp8", "uint8", 2048)
    assert deviating(qwen3_8b(), kv_cache_dtype="fp8") == {"cache_dtype": "asked for by kv_cache_dtype=fp8"}


def test_the_groups_of_a_hybrid_target_keep_their_dtype_beside_an_fp8_draft() -> None:
    target, draft = qwen3_8b()
    state = format("auto", 1 << 20, heads=1, tokens_per_state=-1)
    gdn = group("gdn", "target", backend("GDN_ATTN", state), kind="mamba", layers=12)
    contract = contract_of((changed(target, groups=(*target.groups, gdn)), draft), kv_cache_dtype="fp8")
    assert contract.group("target", "gdn").cache_dtype == "auto"
    assert contract.group("draft", "draft").mirrors == "full"


# vLLM #42068: the target's backend was propagated to a draft that can't use it.


def test_a_backend_that_the_target_is_locked_to_is_not_forced_on_a_non_causal_draft() -> None:
    contract = contract_of(gemma_4_dflash())
    assert {group.attention_backend for group in contract.groups_of("target")} == {"TRITON_ATTN"}
    assert contract.group("draft", "draft").attention_backend == "FLASH_ATTN"
    assert "non-causal attention not supported" in deviating(gemma_4_dflash())["attention_backend"]


def test_asking_for_a_backend_that_the_draft_cannot_use_is_refused_with_its_reasons_and_the_alternatives() -> None:
    error = refused(gemma_4_dflash(), attention_backend="TRITON_ATTN")
    assert (error.field, error.reason) == ("attention_backend", "non-causal attention not supported")
    assert "FLASH_ATTN, FLEX_ATTENTION" in error.remedy


def test_asking_for_a_backend_that_does_not_exist_is_refused() -> None:
    error = refused(qwen3_8b(), attention_backend="FLASHATTN")
    assert (error.field, error.draft) == ("attention_backend", "FLASHATTN for draft")


# vLLM #7252 and other differences between two models.


def test_vocabularies_of_different_size_are_refused() -> None:
    target, draft = qwen3_8b()
    error = refused((changed(target, vocab_size=152_064), draft))
    assert (error.field, error.target, error.draft) == ("vocab_size", "152064", "151936")


def test_a_draft_that_proposes_from_a_part_of_the_vocabulary_is_accepted() -> None:
    target, draft = qwen3_8b()
    assert contract_of((target, changed(draft, draft_vocab_size=32_000))).wire.draft_vocab_size == 32_000
    assert refused((target, changed(draft, draft_vocab_size=200_000))).field == "draft_vocab_size"


def test_another_tokenizer_with_a_vocabulary_of_the_same_size_is_refused() -> None:
    target, draft = qwen3_8b()
    error = refused((target, changed(draft, tokenizer_digest="sha256:other")))
    assert (error.field, error.target, error.draft) == ("tokenizer_digest", "sha256:tokenizer", "sha256:other")


def test_a_draft_without_a_tokenizer_takes_the_targets() -> None:
    target, draft = qwen3_8b()
    contract = contract_of((target, changed(draft, tokenizer_digest=None)))
    assert contract.wire.tokenizer_digest == "sha256:tokenizer"


def test_aux_layers_beyond_the_targets_depth_are_refused() -> None:
    target, draft = qwen3_8b()
    layers = (2, 10, 37)
    error = refused((changed(target, aux_hidden_state_layers=layers), changed(draft, aux_hidden_state_layers=layers)))
    assert (error.field, error.target, error.draft) == ("aux_hidden_state_layers", "0 to 36", "[2, 10, 37]")


def test_the_state_after_the_last_layer_can_be_taken() -> None:
    target, draft = qwen3_8b()
    pair = changed(target, aux_hidden_state_layers=(36,)), changed(draft, aux_hidden_state_layers=(36,))
    assert contract_of(pair).wire.aux_hidden_state_layers == (36,)


def test_a_target_that_would_capture_other_layers_is_refused() -> None:
    target, draft = qwen3_8b()
    assert refused((changed(target, aux_hidden_state_layers=()), draft)).field == "aux_hidden_state_layers"


def test_different_vllm_versions_are_refused_and_different_builds_are_not() -> None:
    target, draft = qwen3_8b()
    error = refused((target, changed(draft, vllm_version="0.33.0")))
    assert (error.field, error.target, error.draft) == ("vllm_version", "0.32.0", "0.33.0")
    assert contract_of((target, changed(draft, vllm_build="cpu"))).draft.vllm_build == "cpu"


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("runner", "v1"),
        ("method", "eagle3"),
        ("num_speculative_tokens", 5),
        ("target_hidden_size", 5120),
        ("wire_hidden_size", 2048),
        ("wire_dtype", "float16"),
        ("decode_context_parallel_size", 2),
    ],
)
def test_whatever_both_sides_size_or_read_by_must_agree(field: str, other: Any) -> None:
    target, draft = qwen3_8b()
    assert refused((target, changed(draft, **{field: other}))).field == field


# One block space.


def test_block_sizes_without_a_common_value_are_refused() -> None:
    target, draft = qwen3_8b()
    pair = (
        with_backend(target, kernel_block_sizes=(BlockSize(size=64),)),
        changed(draft, groups=(group("draft", "draft", backend("FLASHINFER", sizes=(BlockSize(size=16),)), layers=5),)),
    )
    error = refused(pair)
    assert (error.field, error.target, error.draft) == ("block_size", "64 for full", "16 for draft (FLASHINFER)")


def test_unequal_block_counts_with_prefix_caching_are_refused_with_the_reason() -> None:
    target, draft = qwen3_8b()
    pair = changed(target, num_gpu_blocks_override=1000), changed(draft, num_gpu_blocks_override=800)
    error = refused(pair)
    assert (error.field, error.target, error.draft) == ("num_gpu_blocks_override", "1000", "800")
    assert "prefix-cache hit" in error.reason


def test_unequal_block_counts_without_prefix_caching_are_refused_for_the_ids_alone() -> None:
    target, draft = qwen3_8b()
    pair = (
        changed(target, num_gpu_blocks_override=1000, enable_prefix_caching=False),
        changed(draft, num_gpu_blocks_override=800),
    )
    error = refused(pair)
    assert error.field == "num_gpu_blocks_override"
    assert "prefix" not in error.reason


def test_the_target_gives_up_blocks_that_the_draft_has_no_memory_for() -> None:
    target, draft = qwen3_8b()
    small = changed(draft, kv_cache_bytes=2 * GIB)
    assert contract_of((target, small)).num_blocks == 2 * GIB // (5 * 65_536) < contract_of((target, draft)).num_blocks


def test_a_draft_pool_too_small_for_one_request_is_refused() -> None:
    target, draft = qwen3_8b()
    error = refused((target, changed(draft, kv_cache_bytes=GIB // 2)))
    assert error.field == "kv_cache_bytes"
    assert "2560 blocks" in error.reason


@pytest.mark.parametrize(("blocks", "fits"), [(2560, False), (2561, True)])
def test_one_block_is_vllms_own(blocks: int, fits: bool) -> None:
    """A request of 40,960 tokens needs 2,560, of 16 each. Asked for, or all there is: of too few, vLLM itself would say
    so on both sides, after each has loaded."""
    target, draft = qwen3_8b()
    small = changed(draft, kv_cache_bytes=blocks * 5 * 65_536)
    if fits:
        assert contract_of((target, small)).num_blocks == contract_of((target, draft), num_gpu_blocks=blocks).num_blocks
    else:
        assert refused((target, small)).field == "kv_cache_bytes"
        assert refused((target, draft), num_gpu_blocks=blocks).field == "num_gpu_blocks"


def test_a_number_of_blocks_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    error = refused(qwen3_8b(), num_gpu_blocks=1_000_000)
    assert (error.field, error.target) == ("num_gpu_blocks", "at most 45511")


def test_swapped_facts_are_a_programmers_mistake() -> None:
    target, draft = qwen3_8b()
    with pytest.raises(ValueError, match="role='draft' and role='target'"):
        negotiate(draft, target, Policy())


def test_a_target_that_no_backend_runs_is_refused() -> None:
    _, draft = qwen3_8b()
    stranded = side("target", group("full", "target", infeasible=(cannot("FLASH_ATTN", "head_size not supported"),)))
    error = refused((stranded, draft))
    assert (error.field, error.draft) == ("attention_backend", None)
    assert "FLASH_ATTN: head_size not supported" in error.reason
