"""What the target sends for a round: the arguments of vLLM's `propose`, and the rows of its block tables.

Block tables travel as full rows, so the draft's side keeps nothing about a request from one round to the next, and
the end, preemption, resumption or replacement of a request needs no message.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.speculation.messages.errors import MessageError
from cluster.speculation.messages.header import Header, Kind
from cluster.speculation.messages.layout import F32, I32, I64, Layout, Tensor
from cluster.speculation.messages.sizes import MAX_COUNT, WIRE_DTYPES, RoundSizes

_WITH_INPUT_IDS = 1
_DECODE_GRAPH_ELIGIBLE = 2


@dataclass(slots=True, kw_only=True, eq=False)
class ProposeRequest:
    """A round. Names, shapes and dtypes are those of `InputBatch` and `propose` in vLLM 0.32."""

    epoch: int = 0
    step: int = 0
    """Both filled in by whoever sends the round."""
    num_speculative_tokens: int
    """Wanted for this round, 0 to K. With 0 the draft still takes in the states."""
    decode_graph_eligible: bool
    hidden_states: NDArray[Any]
    """[T, H] of `RoundSizes.hidden_dtype`; bfloat16 as uint16."""
    positions: NDArray[np.int64]
    """[T]"""
    query_start_loc: NDArray[np.int32]
    """[B + 1], from 0 to T."""
    idx_mapping: NDArray[np.int64]
    """[B] -> slot, below R."""
    num_scheduled_tokens: NDArray[np.int32]
    """[B]; more than the row has where verification is adaptive."""
    seq_lens_cpu_upper_bound: NDArray[np.int32]
    """[B]"""
    num_sampled: NDArray[np.int32]
    """[B], 0 to K + 1; 0 in a chunk of a prompt that isn't its last."""
    num_rejected: NDArray[np.int32]
    """[B], less than the row has tokens."""
    last_sampled: NDArray[np.int64]
    """[R, 1], by slot."""
    next_prefill_tokens: NDArray[np.int32]
    """[L, R], by slot."""
    temperature: NDArray[np.float32]
    """[R], by slot."""
    seeds: NDArray[np.int64]
    """[R], by slot."""
    block_tables: tuple[NDArray[np.int32], ...]
    """[B, W] for each mirrored table."""
    input_ids: NDArray[np.int32] | None = None
    """[T], where `RoundSizes.with_input_ids`."""
    kv_rows: tuple[NDArray[Any], ...] = ()
    """[T, kv_row_sizes[i]] of `RoundSizes.hidden_dtype` for each mirrored layer: what the target has just stored of the
    round's tokens, keys before values."""

    @property
    def num_reqs(self) -> int:
        return len(self.idx_mapping)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def request_layout(sizes: RoundSizes, num_reqs: int, num_tokens: int) -> Layout:
    """The tensors in the order of the wire, with the range of every value that the draft's kernels index by.

    They check nothing themselves, so a number out of range would be a write outside the draft's pool.
    """
    B, T, K = num_reqs, num_tokens, sizes.num_speculative_tokens
    slots, vocab = sizes.max_num_reqs, sizes.vocab_size
    tensors = [
        Tensor("hidden_states", WIRE_DTYPES[sizes.hidden_dtype], (T, sizes.hidden_size)),
        Tensor("positions", I64, (T,), below=sizes.max_model_len),
        Tensor("idx_mapping", I64, (B,), below=slots),
        Tensor("last_sampled", I64, (slots, 1), below=vocab),
        Tensor("seeds", I64, (slots,)),
        Tensor("temperature", F32, (slots,)),
        Tensor("query_start_loc", I32, (B + 1,), below=T + 1),
        Tensor("num_scheduled_tokens", I32, (B,), below=sizes.max_num_batched_tokens + 1),
        Tensor("seq_lens_cpu_upper_bound", I32, (B,), below=MAX_COUNT - K),  # vLLM adds up to K + 1 to it
        Tensor("num_sampled", I32, (B,), below=K + 2),
        Tensor("num_rejected", I32, (B,), below=K + 1),
        Tensor("next_prefill_tokens", I32, (sizes.num_prefill_lookahead, slots), below=vocab),
    ]
    if sizes.with_input_ids:
        tensors.append(Tensor("input_ids", I32, (T,), below=vocab))
    tables = enumerate(sizes.block_tables)
    tensors += [Tensor(f"block_tables[{i}]", I32, (B, table.width), below=table.num_blocks) for i, table in tables]
    rows = enumerate(sizes.kv_row_sizes)
    tensors += [Tensor(f"kv_rows[{i}]", WIRE_DTYPES[sizes.hidden_dtype], (T, size)) for i, size in rows]
    return Layout.of(tensors)


def max_request_bytes(sizes: RoundSizes) -> int:
    return request_layout(sizes, sizes.max_num_reqs, sizes.max_num_batched_tokens).num_bytes


def request_header(sizes: RoundSizes, request: ProposeRequest) -> Header:
    return Header(
        kind=Kind.PROPOSE_REQUEST,
        epoch=request.epoch,
        step=request.step,
        num_reqs=request.num_reqs,
        num_tokens=request.num_tokens,
        num_speculative_tokens=request.num_speculative_tokens,
        flags=request_flags(sizes, request.decode_graph_eligible),
    )


def request_flags(sizes: RoundSizes, decode_graph_eligible: bool) -> int:
    return _WITH_INPUT_IDS * sizes.with_input_ids | _DECODE_GRAPH_ELIGIBLE * decode_graph_eligible


def is_decode_graph_eligible(flags: int) -> bool:
    return bool(flags & _DECODE_GRAPH_ELIGIBLE)


def check_request_header(sizes: RoundSizes, header: Header) -> None:
    """What makes the layout's size bounded. The layout may be computed after this, not before."""
    if not 1 <= header.num_reqs <= sizes.max_num_reqs:
        raise MessageError(f"the round has {header.num_reqs} requests, it can have 1 to {sizes.max_num_reqs}")
    if not header.num_reqs <= header.num_tokens <= sizes.max_num_batched_tokens:
        limits = f"{header.num_reqs} to {sizes.max_num_batched_tokens}"
        raise MessageError(f"the round has {header.num_tokens} tokens, it can have {limits}")
    if header.num_speculative_tokens > sizes.num_speculative_tokens:
        wanted, limit = header.num_speculative_tokens, sizes.num_speculative_tokens
        raise MessageError(f"the round wants {wanted} speculative tokens, the pair was set up for {limit}")
    expected = request_flags(sizes, False)
    if header.flags & ~_DECODE_GRAPH_ELIGIBLE != expected:
        raise MessageError(f"the request has flags {header.flags:#x}, {expected:#x} was agreed")


def request_arrays(request: ProposeRequest) -> list[NDArray[Any]]:
    """In the order of the layout."""
    return [
        request.hidden_states,
        request.positions,
        request.idx_mapping,
        request.last_sampled,
        request.seeds,
        request.temperature,
        request.query_start_loc,
        request.num_scheduled_tokens,
        request.seq_lens_cpu_upper_bound,
        request.num_sampled,
        request.num_rejected,
        request.next_prefill_tokens,
        *(() if request.input_ids is None else (request.input_ids,)),
        *request.block_tables,
        *request.kv_rows,
    ]


def request_from(sizes: RoundSizes, header: Header, arrays: list[NDArray[Any]]) -> ProposeRequest:
    """`arrays` in the order of the layout, each value within its section's range."""
    tables = 12 + sizes.with_input_ids
    rows = tables + len(sizes.block_tables)
    request = ProposeRequest(
        epoch=header.epoch,
        step=header.step,
        num_speculative_tokens=header.num_speculative_tokens,
        decode_graph_eligible=is_decode_graph_eligible(header.flags),
        hidden_states=arrays[0],
        positions=arrays[1],
        idx_mapping=arrays[2],
        last_sampled=arrays[3],
        seeds=arrays[4],
        temperature=arrays[5],
        query_start_loc=arrays[6],
        num_scheduled_tokens=arrays[7],
        seq_lens_cpu_upper_bound=arrays[8],
        num_sampled=arrays[9],
        num_rejected=arrays[10],
        next_prefill_tokens=arrays[11],
        input_ids=arrays[12] if sizes.with_input_ids else None,
        block_tables=tuple(arrays[tables:rows]),
        kv_rows=tuple(arrays[rows:]),
    )
    _check_rows(request)
    return request


def check_starts(starts: NDArray[np.int32], num_tokens: int) -> None:
    if starts[0] != 0 or starts[-1] != num_tokens:
        raise MessageError(f"query_start_loc goes from {starts[0]} to {starts[-1]}, not from 0 to {num_tokens}")


def _check_rows(request: ProposeRequest) -> None:
    """Rows lie one after the other in [0, T), and each has a token that was not rejected.

    Their numbers are within their ranges, so no difference wraps.
    """
    starts, rejected, scheduled = request.query_start_loc, request.num_rejected, request.num_scheduled_tokens
    check_starts(starts, request.num_tokens)
    lengths = starts[1:] - starts[:-1]
    if np.count_nonzero(rejected >= lengths):
        row = int((rejected >= lengths).argmax())
        raise MessageError(f"request {row} has {lengths[row]} tokens and {rejected[row]} rejected, one must be left")
    if np.count_nonzero(lengths > scheduled):
        row = int((lengths > scheduled).argmax())
        raise MessageError(f"request {row} has {lengths[row]} tokens, of {scheduled[row]} that were scheduled")
