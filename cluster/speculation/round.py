"""A round as vLLM has it on either side: the arguments of `propose`, before they travel and after."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """Names, shapes and dtypes are those of `ProposeRequest`; tensors are on the engine's device, but for what the CPU
    knows. The rows of the block tables go beside it."""

    num_speculative_tokens: int
    decode_graph_eligible: bool

    query_start_loc_np: NDArray[np.int32]
    num_scheduled_tokens: NDArray[np.int32]
    seq_lens_cpu_upper_bound: torch.Tensor
    """On the CPU, as the two before it."""

    hidden_states: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    idx_mapping: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    input_ids: torch.Tensor | None
    kv_rows: tuple[torch.Tensor, ...] = ()

    @property
    def num_reqs(self) -> int:
        return len(self.num_scheduled_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def propose_last(self, drafts: torch.Tensor) -> None:
        """What is proposed where there is no proposal: each draft of `drafts` [B, K] is the last known token."""
        drafts.copy_(self.last_sampled[self.idx_mapping])
