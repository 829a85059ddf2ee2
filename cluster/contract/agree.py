"""What two sides must have in common before any group is looked at."""

from cluster.contract.errors import ContractError
from cluster.contract.facts import SideFacts

_SAME = {
    "vllm_version": (
        "a contract rests on what one release does with its configs, layouts and kernels",
        "install the same vLLM release on both sides",
    ),
    "runner": (
        "the two sides meet at the speculator of vLLM's V2 runner",
        "let both sides use the V2 runner (VLLM_USE_V2_MODEL_RUNNER=1)",
    ),
    "method": (
        "the target captures states and reserves slots for the method that drafts",
        "give both sides the same speculative_config.method",
    ),
    "num_speculative_tokens": (
        "the target reserves and verifies as many slots as the draft fills",
        "give both sides the same num_speculative_tokens",
    ),
    "vocab_size": (
        "a token id of one side that the other has no row for can't be embedded or verified",
        "take a draft with the target's vocabulary, or pad the smaller embedding and head to the larger size",
    ),
    "target_hidden_size": (
        "the draft was trained on states of another width than the target has",
        "take a draft that was trained for this target",
    ),
    "wire_hidden_size": (
        "the buffers of the states that cross are sized by it on both sides",
        "let both sides load the same draft",
    ),
    "wire_dtype": (
        "the states that cross are read as they were written",
        "give both sides the same dtype",
    ),
    "decode_context_parallel_size": (
        "a block id of the target then stands for other tokens than the same id on the draft",
        "set decode_context_parallel_size to 1 on both sides",
    ),
}
"""Field -> (why it must be the same, what to do)."""


def check_pair(target: SideFacts, draft: SideFacts) -> None:
    """Refuse a pair whose sides can't work together, whatever they allocate.

    Raises:
        ContractError: with the first field, in the order above, that differs.
    """
    if (target.role, draft.role) != ("target", "draft"):
        raise ValueError(f"the sides' facts say role={target.role!r} and role={draft.role!r}")
    for field in _SAME:
        check_same(field, getattr(target, field), getattr(draft, field))
    _check_buffers(target, draft)
    _check_tokens(target, draft)
    _check_aux_layers(target, draft)
    _check_quantization(target, draft)


def check_same(field: str, target: object, draft: object) -> None:
    """Refuse two values of a field that must be the same on both sides.

    Raises:
        ContractError: they differ.
    """
    if target != draft:
        reason, remedy = _SAME[field]
        raise ContractError(field, target=str(target), draft=str(draft), reason=reason, remedy=remedy)


def _check_buffers(target: SideFacts, draft: SideFacts) -> None:
    for field in ("max_num_seqs", "max_num_batched_tokens"):
        mine, its = getattr(target, field), getattr(draft, field)
        if its < mine:
            raise ContractError(
                field,
                target=str(mine),
                draft=str(its),
                reason="a round of the target's would not fit into the draft's buffers",
                remedy=f"give the draft at least the target's {field}",
            )


def _check_tokens(target: SideFacts, draft: SideFacts) -> None:
    mine, its = target.tokenizer_digest, draft.tokenizer_digest
    if mine is not None and its is not None and mine != its:
        raise ContractError(
            "tokenizer_digest",
            target=mine,
            draft=its,
            reason="one id means different tokens on the two sides, however equal their vocabularies are in size",
            remedy="take a draft that was trained with the target's tokenizer",
        )
    if draft.draft_vocab_size is not None and draft.draft_vocab_size > target.vocab_size:
        raise ContractError(
            "draft_vocab_size",
            target=f"at most {target.vocab_size}",
            draft=str(draft.draft_vocab_size),
            reason="the draft's head would propose ids that the target doesn't have",
            remedy="correct draft_vocab_size in the draft's config.json",
        )


def _check_aux_layers(target: SideFacts, draft: SideFacts) -> None:
    wanted, depth = draft.aux_hidden_state_layers, target.num_hidden_layers
    if any(not 0 <= layer <= depth for layer in wanted):
        raise ContractError(
            "aux_hidden_state_layers",
            target=f"0 to {depth}",
            draft=str(list(wanted)),
            reason=f"the draft takes states of a layer that a target of {depth} layers doesn't have",
            remedy="take a draft that was trained for this target",
        )
    if target.aux_hidden_state_layers != wanted:
        raise ContractError(
            "aux_hidden_state_layers",
            target=str(list(target.aux_hidden_state_layers)),
            draft=str(list(wanted)),
            reason="the target would capture states of other layers than the draft takes",
            remedy="let both sides read the same draft config",
        )


def _check_quantization(target: SideFacts, draft: SideFacts) -> None:
    """A draft is loaded with its own quantisation (vLLM #49133, #51758); what a user says wins."""
    own = draft.quantization
    if own.source == "target" and own.method != own.checkpoint:
        raise ContractError(
            "quantization",
            target=str(target.quantization.method),
            draft=f"{own.method}, where its checkpoint declares {own.checkpoint}",
            reason="the draft would be loaded with a quantisation read from the target's config: its weights would be "
            "missing, or loaded in another format without a word",
            remedy="set the draft's quantization to what its checkpoint declares (speculative_config.quantization)",
        )
