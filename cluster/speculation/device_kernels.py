"""The two kernels of a round through device memory.

Both take addresses, not tensors: one end of each copy is memory of another process, of which torch knows nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.triton_utils import tl, triton

_BLOCK_WORDS: Final = 4096
_MIN_PIECE_BYTES: Final = 4 * _BLOCK_WORDS
_MAX_PIECES: Final = 128
"""Of one copy; about the multiprocessors of a GPU: a long prompt's states have 64 MiB."""

_LENGTHS_KEPT: Final = 256

_SIGN: Final = 1 << 31


class Copy(NamedTuple):
    """`num_bytes` are whole words of 4."""

    to: int
    source: int
    num_bytes: int


@triton.jit(do_not_specialize=["table"])  # type: ignore[untyped-decorator]
def _copy_kernel(table, BLOCK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    # table: int64 [pieces, 3], in memory of the host, which a GPU reads slowly: each program reads its own row and no
    # other. Triton takes a small address for an int32.
    row = tl.cast(tl.cast(table, tl.int64), tl.pointer_type(tl.int64)) + 3 * tl.program_id(0)
    to = tl.cast(tl.load(row), tl.pointer_type(tl.int32))
    source = tl.cast(tl.load(row + 1), tl.pointer_type(tl.int32))
    num_words = tl.load(row + 2) // 4
    for start in range(0, num_words, BLOCK_WORDS):
        words = start + tl.arange(0, BLOCK_WORDS)
        tl.store(to + words, tl.load(source + words, mask=words < num_words), mask=words < num_words)


@triton.jit(do_not_specialize=["reply", "answered", "step", "wanted"])  # type: ignore[untyped-decorator]
def _take_kernel(  # type: ignore[no-untyped-def]
    drafts,  # [B, K], of the target
    last_sampled,  # [R, 1]
    idx_mapping,  # [B]
    reply,
    answered,
    step,
    wanted,
    vocab_size,
    NUM_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    last = tl.load(last_sampled + tl.load(idx_mapping + row))
    is_there = tl.load(tl.cast(tl.cast(answered, tl.int64), tl.pointer_type(tl.int32))) == step
    columns = tl.arange(0, BLOCK)
    tokens = tl.cast(tl.cast(reply, tl.int64), tl.pointer_type(tl.int64)) + row * NUM_STEPS
    proposed = tl.load(tokens + columns, mask=columns < wanted, other=-1)
    # A token beyond the vocabulary would be looked up in the target's embedding.
    is_token = is_there & (proposed >= 0) & (proposed < vocab_size)
    tl.store(drafts + row * NUM_STEPS + columns, tl.where(is_token, proposed, last), mask=columns < NUM_STEPS)


class Copier:
    """Many copies in one launch, on the current stream."""

    def __init__(self, device: torch.device, *, max_copies: int, num_tables: int) -> None:
        """The GPU reads a launch's copies while it runs: after `num_tables` launches the first must have run."""
        shape = (num_tables, max_copies * _MAX_PIECES, len(Copy._fields))
        self._tables = torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._rows = self._tables.numpy()
        self._launches = 0

    def copy(self, copies: Sequence[Copy]) -> None:
        turn = self._launches % len(self._rows)
        self._launches += 1
        rows, num_pieces = self._rows[turn], 0
        for copy in copies:
            pieces = _pieces(copy.num_bytes)
            rows[num_pieces : num_pieces + len(pieces)] = np.add(pieces, (copy.to, copy.source, 0))
            num_pieces += len(pieces)
        _copy_kernel[(num_pieces,)](self._tables[turn].data_ptr(), BLOCK_WORDS=_BLOCK_WORDS)


@lru_cache(_LENGTHS_KEPT)
def _pieces(num_bytes: int) -> NDArray[np.int64]:
    """[pieces, 3]: what one program copies each, as a Copy from 0 to 0."""
    step = max(_MIN_PIECE_BYTES, 4 * -(-num_bytes // (4 * _MAX_PIECES)))
    starts = np.arange(0, num_bytes, step)
    return np.stack([starts, starts, np.minimum(step, num_bytes - starts)], axis=1)


def take_reply(
    drafts: torch.Tensor,
    *,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    reply: int,
    answered: int,
    step: int,
    wanted: int,
    vocab_size: int,
) -> None:
    """Into `drafts` [B, K] the first `wanted` of each row of the reply at this address, which has the same shape.

    The last known token is in the place of what isn't there: of everything, if the word at `answered` isn't `step`;
    so it is the device that decides, when the stream gets here.
    """
    num_reqs, num_steps = drafts.shape
    signed_step = (step + _SIGN) % (2 * _SIGN) - _SIGN
    _take_kernel[(num_reqs,)](
        drafts,
        last_sampled,
        idx_mapping,
        reply,
        answered,
        signed_step,
        wanted,
        vocab_size,
        NUM_STEPS=num_steps,
        BLOCK=1 << (num_steps - 1).bit_length(),  # Triton's blocks are powers of 2
    )


def copy_of(to: int, tensor: torch.Tensor) -> Copy:
    """Of all of a contiguous tensor."""
    assert tensor.is_contiguous()
    return Copy(to, tensor.data_ptr(), tensor.nbytes)


def copy_into(tensor: torch.Tensor, source: int, num_bytes: int) -> Copy:
    """Into the first bytes of a contiguous tensor."""
    assert tensor.is_contiguous()
    assert num_bytes <= tensor.nbytes
    return Copy(tensor.data_ptr(), source, num_bytes)
