"""What target and draft tell each other before the first round, in this order.

    target                                          draft
    EngineSizes   its engine is built          ──▶  builds its engine by them, loads the draft
    PoolSizes     its KV cache is planned      ──▶  allocates its pool
                                               ◀──  Allocated
    RoundsOpen    sizes of messages, channel   ──▶  opens the channel, serves
                  allocates its own KV cache

Every number by which a buffer is sized is the target's, after vLLM chose its defaults. A default may depend on the
device or on how the engine was started: two processes that each worked out `max_num_batched_tokens` were seen to
disagree, and the round died in a buffer that was too small.
"""

import hashlib
from dataclasses import dataclass

from cluster.channel import ChannelAddress
from cluster.contract.codec import canonical, to_plain
from cluster.speculation.messages import RoundSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """What the draft's engine is built by."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGroup:
    """One KV-cache group of the target, as far as a draft that follows its block table needs to know it."""

    kind: str
    """vLLM's name of the spec's class: "FullAttentionSpec"."""
    block_size: int
    table_width: int
    """Columns of the block table: the most blocks that one request can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """What the draft's KV pool is sized by."""

    num_blocks: int
    groups: tuple[TargetGroup, ...]

    @property
    def digest(self) -> str:
        """In hexadecimal. Messages carry it where no KV contract was made."""
        return hashlib.sha256(canonical(to_plain(self))).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The draft's pool is there."""

    num_blocks: int
    tables: tuple[int, ...]
    """The target's groups whose block tables shall travel: group i of the draft follows `tables[i]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsOpen:
    """How rounds are written, and where."""

    sizes: RoundSizes
    digest: str
    """Of the contract, or of PoolSizes."""
    channel: ChannelAddress
    epoch: int
