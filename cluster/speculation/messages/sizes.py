"""The numbers by which both sides size their buffers: all agreed at the handshake, none derived from defaults."""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cluster.contract.codec import canonical, to_plain
from cluster.contract.errors import DocumentError, require_positive

FloatDtype = Literal["float32", "float16", "bfloat16"]

# numpy has no bfloat16: it travels and is seen as its 16 bits.
WIRE_DTYPES: Final[dict[FloatDtype, np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}

MAX_COUNT: Final = 2**31 - 1  # vLLM counts tokens, slots and blocks in int32


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableSizes:
    """One block table of the target that the draft mirrors, in the blocks that the table counts in."""

    width: int
    block_size: int
    num_blocks: int
    """Every id in the table is below it: the draft's pool has no memory behind a larger one."""

    def __post_init__(self) -> None:
        _require_counts(width=self.width, block_size=self.block_size, num_blocks=self.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSizes:
    """How large a round can be. Names are vLLM's; `max_num_reqs` is its `max_num_seqs`."""

    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """Of the target: every position is below it."""
    num_speculative_tokens: int
    num_prefill_lookahead: int
    """Rows of `next_prefill_tokens`."""
    hidden_size: int
    """Width of the states that are sent: after the draft's `fc` where it has one; 0 where the draft reads none."""
    hidden_dtype: FloatDtype
    vocab_size: int
    """Every token id is below it, drafted ones too."""
    block_tables: tuple[BlockTableSizes, ...]
    with_input_ids: bool
    """Whether requests carry the scheduled token ids: autoregressive drafts read them."""
    kv_row_sizes: tuple[int, ...] = ()
    """For each layer of the target's that the draft mirrors, the elements of one token's keys and values."""

    def __post_init__(self) -> None:
        _require_counts(
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
            num_prefill_lookahead=self.num_prefill_lookahead,
            vocab_size=self.vocab_size,
        )
        if not 0 <= self.hidden_size <= MAX_COUNT:
            raise DocumentError("hidden_size", str(self.hidden_size), f"between 0 and {MAX_COUNT}")
        for i, table in enumerate(self.block_tables):
            if table.width * table.block_size < self.max_model_len:
                found = f"{table.width} blocks of {table.block_size}"
                raise DocumentError(f"block_tables[{i}].width", found, f"room for {self.max_model_len} positions")

    @property
    def digest(self) -> bytes:
        """SHA-256 over all of it: sides that hold different sizes don't understand each other's messages."""
        return hashlib.sha256(canonical({"schema": "dspark-cluster/round-sizes/1", **to_plain(self)})).digest()


def _require_counts(**values: int) -> None:
    require_positive(**values)
    for name, value in values.items():
        if value > MAX_COUNT:
            raise DocumentError(name, str(value), f"at most {MAX_COUNT}")
