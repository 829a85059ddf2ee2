"""The contract: what each side allocates, fixed before either does. Immutable, and known by its digest."""

import hashlib
from dataclasses import dataclass

from cluster.contract.codec import canonical, from_plain, parse, to_plain, to_text
from cluster.contract.errors import DocumentError
from cluster.contract.facts import ConfigWrite, KVCacheLayout, KVCacheSpecKind, KVSharing, QuantizationFacts, Role
from cluster.contract.policy import Policy

CONTRACT_SCHEMA = "dspark-cluster/contract/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Something in which a group of the draft differs from the target, and why."""

    group: str
    field: str
    target: str
    draft: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContract:
    """One KV-cache group, down to the strides of its tensors.

    A layer's tensor is vLLM's view [B, H, N, C]: blocks (of the kernel's size), head slots, states a block, content.
    """

    name: str
    role: Role
    """Who allocates it."""
    shared: bool
    """Whether both sides read what the target writes: it is the target's group, or the draft's mirror of one."""
    mirrors: str
    """The target's group whose blocks it has: its own name, for a group of the target."""
    block_table: str
    """The target's block table that addresses it. Groups of the draft on one table use the same ids at once."""
    layers: tuple[str, ...]
    kind: KVCacheSpecKind
    sliding_window: int | None
    attention_backend: str
    cache_dtype: str
    """The word for the config."""
    dtype: str
    """What that is in memory."""
    block_size: int
    kernel_block_size: int
    num_blocks: int
    layout: KVCacheLayout
    shape: tuple[int, int, int, int]
    """[B, H, N, C], C in bytes."""
    strides: tuple[int, int, int, int]
    """Of [B, H, N, C], in bytes."""
    row_bytes: int
    """Of one stored state over all heads."""
    page_size_bytes: int
    """Of one layer's block, with its padding."""
    scales: str
    index_width: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SideContract:
    """What one side is, wherever it lies, and what it allocates in all."""

    vllm_build: str
    platform: str
    compute_capability: tuple[int, int] | None
    config_digest: str
    dtype: str
    quantization: QuantizationFacts
    tensor_parallel_size: int
    max_model_len: int
    """On the draft's side: a longer request goes on with drafts of an earlier place, few of which are accepted."""
    layout: KVCacheLayout
    bytes_per_block: int
    """Of this side's pool, all layers together; 0 where it has none."""
    constructor_writes: tuple[ConfigWrite, ...]
    """What its constructors changed in a config. In one process with the other side they might change that side's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireContract:
    """What crosses between the sides, and how much of it there can be."""

    method: str
    num_speculative_tokens: int
    vocab_size: int
    draft_vocab_size: int | None
    tokenizer_digest: str | None
    aux_hidden_state_layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVContract:
    """One immutable agreement for a target and its draft. Both sides hold the same digest or don't talk."""

    vllm_version: str
    policy: Policy
    num_blocks: int
    """Of both pools: the draft's uses the target's block ids."""
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    async_scheduling: bool
    wire: WireContract
    target: SideContract
    draft: SideContract
    groups: tuple[GroupContract, ...]
    """By role and name: first the target's, then the draft's own, with its mirrors of the target's."""
    kv_sharing: KVSharing | None
    """How the draft reads the target's shared groups; None where there is none."""
    deviations: tuple[Deviation, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical encoding of everything above, in hexadecimal."""
        return hashlib.sha256(canonical({"schema": CONTRACT_SCHEMA, **to_plain(self)})).hexdigest()

    def side(self, role: Role) -> SideContract:
        return self.target if role == "target" else self.draft

    def groups_of(self, role: Role) -> tuple[GroupContract, ...]:
        """The groups that this side allocates."""
        return tuple(group for group in self.groups if group.role == role)

    @property
    def groups_of_draft_layers(self) -> tuple[GroupContract, ...]:
        """The groups that the draft attends to: those that it allocates, and those of the target that it maps."""
        mapped = (group for group in self.groups_of("target") if group.shared and self.kv_sharing == "map")
        return (*mapped, *self.groups_of("draft"))

    @property
    def mirrors(self) -> tuple[GroupContract, ...]:
        """Of the groups that the draft allocates, the copies of the target's."""
        return tuple(group for group in self.groups_of("draft") if group.shared)

    def pool_bytes(self, role: Role) -> int:
        """All KV-cache memory of one side: what its engine must find available, to plan just this many blocks."""
        return self.num_blocks * self.side(role).bytes_per_block

    def group(self, role: Role, name: str) -> GroupContract:
        """The group of this name that this side allocates; KeyError where there is none."""
        for group in self.groups_of(role):
            if group.name == name:
                return group
        raise KeyError(name)

    def to_json(self) -> str:
        return to_text({"schema": CONTRACT_SCHEMA, "digest": self.digest, **to_plain(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> "KVContract":
        """Read what `to_json` wrote, and check that it is still that.

        Raises:
            DocumentError: with the path of the first key that is wrong; `digest` if any value was changed.
        """
        plain = parse(text)
        schema, digest = plain.pop("schema", None), plain.pop("digest", None)
        if schema != CONTRACT_SCHEMA:
            raise DocumentError("schema", repr(schema), CONTRACT_SCHEMA)
        contract = from_plain(cls, plain)
        if digest != contract.digest:
            raise DocumentError("digest", repr(digest), f"{contract.digest}, the digest of this content")
        return contract
