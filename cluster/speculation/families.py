"""What vLLM's speculators of each method read of a round, beyond positions, counts, slots and block tables."""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFamily:
    states: Literal["fused", "last"] | None
    """Of the target: its auxiliary hidden states, after what the draft does to them first (`fc`), which the target
    runs; or its last hidden states; or none."""
    reads_input_ids: bool
    """The token ids that the target has just run, and how long their sequences are: it goes on from there, a token a
    step."""
    reuses_attention: bool = False
    """Its first pass is over the target's batch as it is, so it takes the target's attention metadata with it."""


FAMILIES: Final = {
    "dspark": DraftFamily(states="fused", reads_input_ids=False),
    "dflash": DraftFamily(states="fused", reads_input_ids=False),
    "eagle3": DraftFamily(states="fused", reads_input_ids=True, reuses_attention=True),
    "mtp": DraftFamily(states="last", reads_input_ids=True, reuses_attention=True),
    "draft_model": DraftFamily(states=None, reads_input_ids=True),
}
"""By vLLM's name of the method. Of its `mtp` drafts there is Gemma 4's, which reads the target's own KV, too."""
