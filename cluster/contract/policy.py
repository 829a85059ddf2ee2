"""What the user decides about the pair; everything else follows from the facts."""

from dataclasses import dataclass
from typing import Final, Literal

from cluster.contract.errors import DocumentError, require_positive
from cluster.contract.facts import KVSharing

INHERIT = "inherit"
"""The target's, where the draft can run it."""
AUTO: Final = "auto"
"""Select again: the draft's own first choice. In vLLM, `None` means this, and people read it as `inherit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the draft's own groups are chosen. Never None: vLLM #52288 began with one."""

    attention_backend: str = INHERIT
    """`inherit`, `auto`, or a name of vLLM's AttentionBackendEnum for the draft."""
    kv_cache_dtype: str = INHERIT
    """`inherit`, `auto`, or a word of vLLM's CacheDType for the draft. Its own word `auto`, the model's dtype, has the
    dtype's name here, such as `bfloat16`."""
    kv_sharing: Literal["auto", KVSharing] = AUTO
    """For a draft that reads its target's KV; `auto` is the best way that the channel between them has."""
    strict: bool = False
    """Refuse every deviation, also one that was asked for."""
    num_gpu_blocks: int | None = None
    """Blocks of both pools; None for as many as both sides can hold."""

    def __post_init__(self) -> None:
        for name in ("attention_backend", "kv_cache_dtype"):
            if not getattr(self, name):
                raise DocumentError(name, repr(getattr(self, name)), f"{INHERIT}, {AUTO} or a name")
        require_positive(num_gpu_blocks=self.num_gpu_blocks)
