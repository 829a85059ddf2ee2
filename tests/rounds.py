"""Rounds of random tensors, and a draft without a model that answers them."""

import queue
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cluster.channel import ChannelClosed, ChannelError
from cluster.channel.device import ANSWERED_OFFSET, DeviceChannel, has_reached
from cluster.speculation.messages import (
    BlockTableSizes,
    MessageCodec,
    RoundSizes,
    max_notice_bytes,
    max_reply_bytes,
    max_request_bytes,
)
from cluster.speculation.round import Round

CPU = torch.device("cpu")
DEADLINE_S = 30.0
K = 3
SIZES = RoundSizes(
    max_num_reqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
    num_speculative_tokens=K,
    num_prefill_lookahead=1,
    hidden_size=6,
    hidden_dtype="bfloat16",
    vocab_size=100,
    block_tables=(
        BlockTableSizes(width=2, block_size=32, num_blocks=8),
        BlockTableSizes(width=4, block_size=16, num_blocks=8),
    ),
    with_input_ids=True,
    kv_row_sizes=(8, 4),
)
CODEC = MessageCodec(SIZES, "0f" * 32)


Notices = queue.SimpleQueue[bytes | None]


class CpuDeviceChannel(DeviceChannel):
    """What stands for a device channel where there is no GPU has these in common: buffers that lie here, and notices
    that go through a queue. A stream that has to wait keeps its thread; so the thread is the stream."""

    def __init__(self, notices: Notices) -> None:
        self.max_send_bytes = max_notice_bytes(SIZES)
        self.max_receive_bytes = 1
        self.request_buffer = torch.zeros(max_request_bytes(SIZES), dtype=torch.uint8)
        self.reply_buffer = torch.zeros(max_reply_bytes(SIZES), dtype=torch.uint8)
        self.request_address, self.reply_address = self.request_buffer.data_ptr(), self.reply_buffer.data_ptr()
        self.lost: ChannelError | None = None
        self._requested = self._replied = 0
        self._notices = notices

    def send(self, parts: Sequence[memoryview], deadline_s: float) -> int:  # noqa: ARG002
        self._notices.put(bytes(parts[0]))
        return len(parts[0])

    def recv(self, into: memoryview, deadline_s: float) -> int:  # noqa: ARG002
        notice = self._notices.get()
        if notice is None:
            raise ChannelClosed("closed")
        into[: len(notice)] = notice
        return len(notice)

    def abort(self) -> None:
        self._notices.put(None)

    def reply(self, step: int, num_bytes: int) -> None:  # noqa: ARG002
        self.reply_buffer.view(torch.uint32)[ANSWERED_OFFSET // 4] = step

    def await_reply(self, step: int) -> None:
        wait_until(lambda: has_reached(self._replied, step))

    @property
    def requested(self) -> int:
        return self._requested

    @property
    def replied(self) -> int:
        return self._replied

    def release(self, step: int) -> None:
        self._replied = step

    def gone(self) -> ChannelError | None:
        return self.lost

    def new_event(self) -> "CpuEvent":
        return CpuEvent()


class CpuEvent:
    """Of a stream that is a thread."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent", /) -> float:
        return 1e3 * (end.at_s - self.at_s)


def wait_until(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_over():
        assert time.monotonic() < end, "the stream waits for ever"
        time.sleep(1e-3)


class Adding:
    """A draft without a model: drafts 10 more than the last token, 11 more, 12 more."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        tables = [
            torch.full((SIZES.max_num_reqs, table.width), -1, dtype=torch.int32, device=device)
            for table in SIZES.block_tables
        ]
        self.block_tables = ((tables[0],), (tables[1], torch.empty_like(tables[1])))  # two groups follow the second

    def propose(self, round: Round) -> torch.Tensor:
        return round.last_sampled[round.idx_mapping] + torch.arange(10, 10 + K, device=self.device)


class Recording(Adding):
    """Keeps what came."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.came: list[dict[str, torch.Tensor]] = []

    def propose(self, round: Round) -> torch.Tensor:
        self.came.append({name: tensor.clone() for name, tensor in tensors_of(round).items()})
        return super().propose(round)


TENSORS = (
    "hidden_states",
    "positions",
    "query_start_loc",
    "idx_mapping",
    "num_sampled",
    "num_rejected",
    "last_sampled",
    "next_prefill_tokens",
    "temperature",
    "seeds",
    "input_ids",
)


def tensors_of(round: Round) -> dict[str, torch.Tensor]:
    """All that travels, but for the block tables."""
    rows = {f"kv_rows[{i}]": rows for i, rows in enumerate(round.kv_rows)}
    return {name: getattr(round, name) for name in TENSORS} | rows


def round_of(
    lengths: Sequence[int], *, seed: int = 0, wanted: int = K, device: torch.device = CPU
) -> tuple[Round, list[torch.Tensor]]:
    """And its rows of block tables."""
    random = torch.Generator().manual_seed(seed)
    T, B, slots = sum(lengths), len(lengths), SIZES.max_num_reqs
    starts = np.cumsum([0, *lengths], dtype=np.int32)

    def some(*shape: int, below: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=random).to(device, dtype)

    tables = [some(B, table.width, below=table.num_blocks, dtype=torch.int32) for table in SIZES.block_tables]
    return Round(
        num_speculative_tokens=wanted,
        decode_graph_eligible=True,
        query_start_loc_np=starts,
        num_scheduled_tokens=np.array(lengths, np.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        hidden_states=torch.randn(T, SIZES.hidden_size, generator=random).to(device, torch.bfloat16),
        positions=some(T, below=64, dtype=torch.int64),
        query_start_loc=torch.from_numpy(starts).to(device),
        idx_mapping=torch.randperm(slots, generator=random)[:B].to(device),
        num_sampled=some(B, below=K + 2, dtype=torch.int32),
        num_rejected=some(B, below=K + 1, dtype=torch.int32) % torch.tensor(lengths, dtype=torch.int32, device=device),
        last_sampled=some(slots, 1, below=80, dtype=torch.int64),
        next_prefill_tokens=some(1, slots, below=100, dtype=torch.int32),
        temperature=torch.rand(slots, generator=random).to(device),
        seeds=some(slots, below=1000, dtype=torch.int64),
        input_ids=some(T, below=100, dtype=torch.int32),
        kv_rows=tuple(torch.randn(T, size, generator=random).to(device, torch.bfloat16) for size in SIZES.kv_row_sizes),
    ), tables


def drafts_of(num_reqs: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.full((SIZES.max_num_reqs, K), -7, device=device)[:num_reqs]
