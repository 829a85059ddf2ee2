"""Which speculation method a draft is for, and whether it fits its target: read from the two configs alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.errors import UserError
from cluster.models.folder import ModelFolder

Method = Literal["dspark", "dflash", "eagle3", "mtp", "draft_model"]

_ARCHITECTURES: dict[str, Method] = {
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DFlashDraftModel": "dflash",
    "Gemma4AssistantForCausalLM": "mtp",
    "Gemma4UnifiedAssistantForCausalLM": "mtp",
}
# As vLLM detects them, in its order.
_NAMES: tuple[Method, ...] = ("eagle3", "dflash", "dspark")

# A standalone draft knows no block size. More than this has never paid, and vLLM reserves slots for all of them.
_MAX_STANDALONE_TOKENS = 16
DEFAULT_STANDALONE_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A draft that fits its target: how it drafts and how many tokens a round (K)."""

    draft: ModelFolder
    method: Method
    num_speculative_tokens: int


def plan_speculation(target: ModelFolder, draft: ModelFolder, num_speculative_tokens: int | None) -> Speculation:
    """Detect the draft's method and check the pair.

    `num_speculative_tokens` None means the number that the draft was trained for. Raises UserError when vocabulary,
    hidden size, auxiliary layers or K don't fit.
    """
    method = detect_method(draft)
    _check_vocabulary(target, draft)
    if method != "draft_model":
        _check_hidden_size(target, draft)
        _check_auxiliary_layers(target, draft)
    tokens = _choose_tokens(draft, method, num_speculative_tokens)
    return Speculation(draft=draft, method=method, num_speculative_tokens=tokens)


def detect_method(draft: ModelFolder) -> Method:
    """By architecture, then by the name of folder or repository (not of the folders above it); else standalone.

    A DeepSeek-V4 checkpoint has its DSpark draft inside: named as the draft, it is that.
    """
    for architecture in draft.architectures:
        if architecture in _ARCHITECTURES:
            return _ARCHITECTURES[architecture]
        if "Eagle3" in architecture:  # of which every family of targets has one
            return "eagle3"
    if draft.integer("dspark_block_size") is not None:
        return "dspark"
    name = Path(draft.name).name.lower()
    return next((method for method in _NAMES if method in name), "draft_model")


def auxiliary_layers(draft: ModelFolder) -> tuple[int, ...]:
    """The target layers whose outputs the draft reads, as its config counts them (from 0); empty where unsaid."""
    nested = (draft.config.get(key) for key in ("dflash_config", "dspark_config"))
    sources = [draft.config, draft.text_config, *(part for part in nested if isinstance(part, dict))]
    for key in ("dspark_target_layer_ids", "target_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        for source in sources:
            if isinstance(source.get(key), Iterable):
                return tuple(int(layer) for layer in source[key])
    return ()


def _check_vocabulary(target: ModelFolder, draft: ModelFolder) -> None:
    theirs, ours = target.integer("vocab_size"), draft.integer("vocab_size")
    if theirs is not None and ours is not None and theirs != ours:
        raise UserError(
            f"draft {draft.name}",
            f"its vocabulary has {ours:,} tokens, the target's {theirs:,}",
            f"use a draft that was trained for {target.name}",
        )


def _check_hidden_size(target: ModelFolder, draft: ModelFolder) -> None:
    theirs = target.integer("hidden_size")
    names = ("backbone_hidden_size", "target_hidden_size", "hidden_size")
    ours = next((size for name in names if (size := draft.integer(name))), None)
    if theirs is not None and ours is not None and theirs != ours:
        raise UserError(
            f"draft {draft.name}",
            f"it reads hidden states of size {ours:,}, the target's have {theirs:,}",
            f"use a draft that was trained for {target.name}",
        )


def _check_auxiliary_layers(target: ModelFolder, draft: ModelFolder) -> None:
    depth = target.integer("num_hidden_layers")
    if depth is None:
        return
    if beyond := [layer for layer in auxiliary_layers(draft) if not 0 <= layer < depth]:
        raise UserError(
            f"draft {draft.name}",
            f"it reads the target's layer {beyond[0]}, but the target has layers 0 to {depth - 1}",
            f"use a draft that was trained for {target.name}",
        )


def trained_tokens(draft: ModelFolder, method: Method) -> int | None:
    """How many tokens a round the draft was trained for, or None where its config doesn't say.

    DSpark drafts as many tokens as its block has places; in DFlash's block the first place is the last known token.
    """
    block = draft.integer("block_size") or draft.integer("dspark_block_size")
    if block is None or method not in ("dspark", "dflash"):
        return None
    return block if method == "dspark" else block - 1


def _choose_tokens(draft: ModelFolder, method: Method, wanted: int | None) -> int:
    trained = trained_tokens(draft, method)
    if wanted is None:
        return trained or DEFAULT_STANDALONE_TOKENS
    limit = trained or _MAX_STANDALONE_TOKENS
    if not 1 <= wanted <= limit:
        why = f"the draft was trained for 1 to {limit}" if trained else f"it must be from 1 to {limit}"
        raise UserError(f"--num-speculative-tokens {wanted}", why, "choose a number in that range, or leave it out")
    return wanted
