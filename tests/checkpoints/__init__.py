"""Tiny seeded checkpoints of the real architectures, written as Hugging Face folders.

`make_pair` writes a target and its draft. The plain pairs have random weights, so that next to nothing is accepted; the
`-agreeing` ones follow a successor table, of which the draft knows a part, so that rounds of every length occur.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints import deepseek_v4, eagle3, gemma4, qwen3
from tests.checkpoints.shapes import K
from tests.checkpoints.successor import SuccessorTable, successor_table

__all__ = ["CONFIG_ONLY_PAIRS", "PAIRS", "TinyPair", "make_pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPair:
    """Two folders, and the `method` and `num_speculative_tokens` of vLLM's speculative config."""

    name: str
    target: Path
    draft: Path
    method: str
    num_speculative_tokens: int


_Writer = Callable[[Path, int, SuccessorTable | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """`period` is that of the agreeing target's text: None where the draft can follow any."""

    write_target: _Writer
    write_draft: _Writer
    method: str
    period: int | None = None


_FAMILIES = {
    "qwen3-dspark": _Family(write_target=qwen3.write_target, write_draft=qwen3.write_dspark_draft, method="dspark"),
    "gemma4-dspark": _Family(write_target=gemma4.write_target, write_draft=gemma4.write_dspark_draft, method="dspark"),
    "gemma4-mtp": _Family(write_target=gemma4.write_target, write_draft=gemma4.write_assistant, method="mtp"),
    "qwen3-dflash": _Family(
        write_target=qwen3.write_target, write_draft=qwen3.write_dflash_draft, method="dflash", period=9
    ),
    "qwen3-dflash-hybrid": _Family(
        write_target=qwen3.write_target, write_draft=qwen3.write_hybrid_dflash_draft, method="dflash", period=9
    ),
    "qwen3-eagle3": _Family(write_target=qwen3.write_target, write_draft=eagle3.write_draft, method="eagle3"),
    "qwen3-draft-model": _Family(
        write_target=qwen3.write_target, write_draft=qwen3.write_standalone_draft, method="draft_model"
    ),
}
_AGREEING = "-agreeing"

PAIRS = (*_FAMILIES, *(name + _AGREEING for name in _FAMILIES))
CONFIG_ONLY_PAIRS = ("deepseek-v4-dspark",)


def make_pair(name: str, folder: Path, *, seed: int = 0) -> TinyPair:
    """Write the pair `name`, one of PAIRS or CONFIG_ONLY_PAIRS, below `folder`: the same bytes for the same seed."""
    target, draft = folder / "target", folder / "draft"
    if name in CONFIG_ONLY_PAIRS:
        deepseek_v4.write_config_only(target)
        return TinyPair(name=name, target=target, draft=target, method="dspark", num_speculative_tokens=K)
    if name not in PAIRS:
        raise ValueError(f"no pair {name!r}; there are {', '.join(PAIRS + CONFIG_ONLY_PAIRS)}")
    family = _FAMILIES[name.removesuffix(_AGREEING)]
    table = successor_table(seed, family.period) if name.endswith(_AGREEING) else None
    family.write_target(target, 2 * seed, table)
    family.write_draft(draft, 2 * seed + 1, table)
    return TinyPair(name=name, target=target, draft=draft, method=family.method, num_speculative_tokens=K)
