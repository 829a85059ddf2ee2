"""The two kernels of a round through device memory.

Both take addresses, not tensors: one end of each copy is memory of another process, of which torch knows nothing.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from vllm.triton_utils import tl, triton

_BLOCK_WORDS: Final = 1024
_MAX_PROGRAMS_A_COPY: Final = 128
"""About the multiprocessors of a GPU: a long prompt's states have 64 MiB."""

_ROW_WORDS: Final = 4
"""Of 8 bytes, the last unused: a row is 32 bytes, what a GPU reads from the host at a time."""

_SIGN: Final = 1 << 31


class Copy(NamedTuple):
    """`num_bytes` are whole words of 4."""

    to: int
    source: int
    num_bytes: int


@triton.jit(do_not_specialize=["table"])  # type: ignore[untyped-decorator]
def _copy_kernel(table, ROW_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    # table: int64 [copies, ROW_WORDS], in memory of the host. Reading it takes as long as the whole copy of a decode
    # round, so each program does it once. Triton takes a small address for an int32.
    columns = tl.arange(0, ROW_WORDS)
    row = tl.cast(tl.cast(table, tl.int64), tl.pointer_type(tl.int64)) + ROW_WORDS * tl.program_id(0)
    copy = tl.load(row + columns)
    to = tl.cast(tl.sum(tl.where(columns == 0, copy, 0)), tl.pointer_type(tl.int32))
    source = tl.cast(tl.sum(tl.where(columns == 1, copy, 0)), tl.pointer_type(tl.int32))
    num_words = tl.sum(tl.where(columns == 2, copy, 0)) // 4
    for start in range(tl.program_id(1) * BLOCK_WORDS, num_words, tl.num_programs(1) * BLOCK_WORDS):
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
        is_cuda = device.type == "cuda"
        self._tables = torch.zeros((num_tables, max_copies, _ROW_WORDS), dtype=torch.int64, pin_memory=is_cuda)
        self._rows = self._tables.numpy()[:, :, : len(Copy._fields)]
        self._max_programs = _MAX_PROGRAMS_A_COPY if is_cuda else 1
        self._launches = 0

    def copy(self, copies: Sequence[Copy]) -> None:
        turn = self._launches % len(self._rows)
        self._launches += 1
        self._rows[turn, : len(copies)] = copies
        longest = max(copy.num_bytes for copy in copies)
        programs = min(-(-longest // (4 * _BLOCK_WORDS)), self._max_programs)
        _copy_kernel[(len(copies), programs)](
            self._tables[turn].data_ptr(), ROW_WORDS=_ROW_WORDS, BLOCK_WORDS=_BLOCK_WORDS
        )


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
