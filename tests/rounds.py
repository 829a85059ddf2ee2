"""Rounds of random tensors, and a draft without a model that answers them."""

from collections.abc import Sequence

import numpy as np
import torch

from cluster.speculation.messages import BlockTableSizes, MessageCodec, RoundSizes
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
    draft_logits_dtype=None,
    kv_row_sizes=(8, 4),
)
CODEC = MessageCodec(SIZES, "0f" * 32)


class Recording:
    """A draft without a model: keeps what came, and drafts 10 more than the last token, 11 more, 12 more."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        tables = [
            torch.full((SIZES.max_num_reqs, table.width), -1, dtype=torch.int32, device=device)
            for table in SIZES.block_tables
        ]
        self.block_tables = ((tables[0],), (tables[1], torch.empty_like(tables[1])))  # two groups follow the second
        self.came: list[dict[str, torch.Tensor]] = []

    def propose(self, round: Round) -> torch.Tensor:
        self.came.append({name: tensor.clone() for name, tensor in tensors_of(round).items()})
        return round.last_sampled[round.idx_mapping] + torch.arange(10, 10 + K, device=self.device)


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
