"""What an engine *would* allocate, as plain data: one `SideFacts` each for the target and the draft.

A probe or a worker fills them, JSON carries them, `negotiate` turns two of them into a contract. Names are vLLM's.
All figures are those of one tensor-parallel rank.
"""

from dataclasses import dataclass
from typing import Literal

from cluster.contract.codec import from_plain, parse, to_plain, to_text
from cluster.contract.errors import DocumentError, require_positive, require_some

FACTS_SCHEMA = "dspark-cluster/facts/1"

Role = Literal["target", "draft"]

KVSharing = Literal["map", "mirror"]
"""How a draft reads its target's KV: the target's own pages, mapped into its process, or a copy of its own, whose rows
come with each round."""

KVCacheSpecKind = Literal[
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    "sink_full_attention",
    "encoder_only_attention",
    "cross_attention",
]
"""vLLM's KVCacheSpecKind. GQA is `full_attention` or `sliding_window`; sparse and non-causal are flags of the group."""

KVCacheLayout = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""vLLM's KVCacheLayout: the letters are the axes of the pool from outermost to innermost, L layer, B block, H head,
N state, C content. Listed in vLLM's order, which breaks its ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """Tokens a block that a kernel takes: exactly `size` (vLLM: an int), or any multiple (vLLM: MultipleOf)."""

    size: int
    multiple: bool = False

    def __post_init__(self) -> None:
        require_positive(size=self.size)

    def accepts(self, block_size: int) -> bool:
        return block_size % self.size == 0 if self.multiple else block_size == self.size

    def __str__(self) -> str:
        return f"MultipleOf({self.size})" if self.multiple else str(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFacts:
    """One cache dtype under one backend: how wide a row is written, and how wide it is read.

    The two widths differ where a constructor rewrote a shared config between the choice of the one and of the other
    (vLLM #52288); a healthy engine leaves both `read_` fields out.
    """

    cache_dtype: str
    """The word for `cache_config.cache_dtype`, such as `auto`, `bfloat16` or `fp8_ds_mla`: the one that the layers end
    with, where a constructor has a name of its own for what was asked (FlashMLA's `fp8` is `fp8_ds_mla`)."""
    dtype: str
    """What the tensors are made of, without `torch.`, such as `bfloat16` or `uint8`."""
    num_heads: int
    """H of a page [H, N, C]: head slots, which needn't be KV heads (`AttentionSpec.num_heads`)."""
    state_content_bytes: int
    """C of a page [H, N, C]: bytes of one stored state in one head slot, K and V together."""
    read_cache_dtype: str | None = None
    read_row_bytes: int | None = None
    tokens_per_state: int = 1
    """Tokens that one stored state covers; -1 for one state a block (Mamba)."""
    page_size_padded: int | None = None
    """Bytes of a page where it is padded to a fixed size, whatever it holds."""
    page_alignment: int = 1
    """A page is padded to a multiple of this many bytes (DeepSeek-V4: 576 or 512)."""
    block_stride_alignment: int = 1
    """Bytes that the distance between two blocks must be a multiple of."""

    def __post_init__(self) -> None:
        require_positive(
            num_heads=self.num_heads,
            state_content_bytes=self.state_content_bytes,
            page_alignment=self.page_alignment,
            block_stride_alignment=self.block_stride_alignment,
            page_size_padded=self.page_size_padded,
            read_row_bytes=self.read_row_bytes,
        )
        if self.tokens_per_state == 0 or self.tokens_per_state < -1:
            raise DocumentError("tokens_per_state", str(self.tokens_per_state), "positive, or -1 for one state a block")

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored state over all heads: one token's row, unless `tokens_per_state` says otherwise."""
        return self.num_heads * self.state_content_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """An attention backend that can run a group: what it takes, its formats in order of preference."""

    name: str
    """A name of vLLM's AttentionBackendEnum."""
    formats: tuple[FormatFacts, ...]
    kernel_block_sizes: tuple[BlockSize, ...]
    """`get_supported_kernel_block_sizes`."""
    splits_blocks: bool = False
    """vLLM may split a block into kernel blocks, so that an exact kernel size stands for its multiples too. Not where
    blocks are packed or padded, and never where a state covers more than one token."""
    layouts: tuple[KVCacheLayout, ...] = ()
    """`supported_kv_cache_layouts`, most preferred first; none where any will do."""
    index_width: int | None = None
    """Sparse attention: indices a token in the table that the metadata builder makes."""
    index_widths_read: tuple[int, ...] = ()
    """Sparse attention: the widths that this backend's kernels take."""

    def __post_init__(self) -> None:
        require_some(formats=self.formats, kernel_block_sizes=self.kernel_block_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibleBackend:
    """A backend that can't run a group, with `AttentionBackend.validate_configuration`'s reasons."""

    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Layers of one KV-cache group that have the same spec.

    A group of vLLM whose layers differ (UniformTypeKVCacheSpecs) is several of these with one `block_table`.
    """

    name: str
    """Unique on its side."""
    role: Role
    """Whose KV it is. In a draft's facts `target` says: these layers read the target's KV, as Gemma 4's MTP does."""
    layers: tuple[str, ...]
    """Layers that hold the KV, by vLLM's names; of the target, where the draft reads the target's: they tell which
    group of it."""
    kind: KVCacheSpecKind
    backends: tuple[BackendFacts, ...]
    """Feasible ones in order of preference. The first, with its first format, is what the engine as configured takes;
    its constructors ran for that one."""
    infeasible: tuple[InfeasibleBackend, ...] = ()
    block_size: int
    """Tokens a block, as configured."""
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    use_sparse: bool = False
    use_non_causal: bool = False
    sliding_window: int | None = None
    block_table: str | None = None
    """The table that addresses it, where it shares one with other groups of its side; else it has its own."""
    scales: str = "none"
    """How K and V are scaled, and a digest where scales are data, such as `none` or `checkpoint:9f2c…`."""

    def __post_init__(self) -> None:
        require_some(layers=self.layers)
        require_positive(block_size=self.block_size, sliding_window=self.sliding_window)

    @property
    def table(self) -> str:
        return self.block_table or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFacts:
    """Which quantisation the weights are loaded with, and who said so."""

    method: str | None = None
    """`ModelConfig.quantization` as the engine resolves it; None for unquantised."""
    checkpoint: str | None = None
    """What the side's own checkpoint declares."""
    source: Literal["checkpoint", "user", "target"] = "checkpoint"
    """Where `method` was read from. `target`, in a draft's facts, is the fault of vLLM #51758."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigWrite:
    """A constructor changed a config that it was given."""

    field: str
    """Config and field, such as `cache_config.cache_dtype`."""
    old: str
    new: str
    writer: str
    """The class whose constructor it was."""
    location: str
    """File inside its package, and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """One side of the pair, as it would run."""

    role: Role
    vllm_version: str
    """The release, such as `0.32.0`."""
    vllm_build: str
    """The wheel's local part, such as `cpu` or `cu130`; two sides may differ in it."""
    runner: Literal["v1", "v2"]
    platform: str
    compute_capability: tuple[int, int] | None = None
    model: str
    config_digest: str
    tokenizer_digest: str | None = None
    """None where the side has no tokenizer of its own and takes the other's."""
    vocab_size: int
    draft_vocab_size: int | None = None
    """Of the head, where a draft proposes from a part of the vocabulary and maps its ids to the target's."""
    dtype: str
    quantization: QuantizationFacts
    max_model_len: int
    method: str
    """`speculative_config.method`."""
    num_speculative_tokens: int
    """K."""
    num_hidden_layers: int
    hidden_size: int
    target_hidden_size: int
    """Width of the target's states: a target's own, and what a draft was trained on."""
    aux_hidden_state_layers: tuple[int, ...] = ()
    """The target's layers whose states the draft takes, in vLLM's counting: 0 is the embedding, n the n-th layer."""
    wire_hidden_size: int
    """Width of the states that cross, after the draft's `fc`."""
    wire_dtype: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    async_scheduling: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    shared_weight_bytes: int = 0
    """Of a draft's `weight_bytes`: embedding and head that it would share with its target in one process."""
    projection_bytes: int = 0
    """Of a draft's `weight_bytes`: the `fc`, which the target's process holds in the split."""
    kv_cache_bytes: int
    """Memory for KV cache."""
    num_gpu_blocks_override: int | None = None
    kv_exports: tuple[KVSharing, ...] = ("map", "mirror")
    """Of a target: how a draft may read its KV, best first. A channel between hosts can't map."""
    groups: tuple[GroupFacts, ...]
    constructor_writes: tuple[ConfigWrite, ...] = ()

    def __post_init__(self) -> None:
        require_some(groups=self.groups)
        require_positive(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
        )
        if self.role == "target" and any(group.role != "target" for group in self.groups):
            raise DocumentError("groups", "of the draft", "of the target, on the target's side")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise DocumentError("groups", f"named {', '.join(sorted(names))}", "named apart")

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that are scheduled but not settled (`VllmConfig.max_in_flight_tokens`)."""
        batches = self.pipeline_parallel_size if self.pipeline_parallel_size > 1 else 1 + self.async_scheduling
        return batches * self.max_num_batched_tokens

    def to_json(self) -> str:
        return to_text({"schema": FACTS_SCHEMA, **to_plain(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> "SideFacts":
        """Read what `to_json` wrote.

        Raises:
            DocumentError: with the path of the first key that is wrong.
        """
        plain = parse(text)
        schema = plain.pop("schema", None)
        if schema != FACTS_SCHEMA:
            raise DocumentError("schema", repr(schema), FACTS_SCHEMA)
        return from_plain(cls, plain)
