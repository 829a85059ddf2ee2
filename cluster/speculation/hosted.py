"""The draft's side of the split: vLLM's own speculator, fed with a target's rounds."""

from typing import Any

import numpy as np
import torch
from dspark.v1.control_pb2 import EngineSizes
from numpy.typing import NDArray

from cluster.contract.contract import KVContract
from cluster.control.member import Member
from cluster.speculation import draft_seam
from cluster.speculation.handshake import tables_to_follow
from cluster.speculation.messages import ProposeRequest


class HostedSpeculator:
    """Keeps nothing about a request between rounds but what its KV pool holds, under the target's block ids."""

    def __init__(self, engine_args: dict[str, Any], sizes: EngineSizes) -> None:
        """Load the draft. `engine_args` are the target's, of which `sizes` replace all that a default may decide."""
        self._executor = draft_seam.start_executor(
            engine_args
            | {
                "max_num_seqs": sizes.max_num_seqs,
                "max_num_batched_tokens": sizes.max_num_batched_tokens,
                "max_model_len": sizes.max_model_len,
            }
        )
        self._runner = draft_seam.runner_of(self._executor)
        self._tables: tuple[int, ...] = ()

    def allocate(self, member: Member) -> KVContract:
        """Negotiate the KV contract with the target, and allocate what it says.

        Raises:
            ContractError, ControlError, ContractViolation: there is no contract, or it can't be kept.
        """
        with torch.inference_mode():
            contract = draft_seam.allocate(self._executor, member)
        self._tables = tables_to_follow(contract, draft_seam.layers_by_group(self._runner))
        return contract

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Columns of the block tables, one for each that the target sends."""
        widths = draft_seam.block_table_widths(self._runner)
        return tuple(widths[self._tables.index(table)] for table in range(len(set(self._tables))))

    def propose(self, request: ProposeRequest) -> NDArray[np.int64]:
        """The drafts [B, K] of a round. The request's arrays are read before this returns, never kept."""
        with torch.inference_mode():
            drafts = self._propose(request)
        ids: NDArray[np.int64] = drafts[:, : request.num_speculative_tokens].cpu().numpy()
        return ids

    def _propose(self, request: ProposeRequest) -> torch.Tensor:
        rows = [self._tensor(table) for table in request.block_tables]
        draft_seam.write_block_tables(self._runner, [rows[table] for table in self._tables])
        hidden_states = self._tensor(request.hidden_states)
        if hidden_states.dtype == torch.uint16:
            hidden_states = hidden_states.view(torch.bfloat16)
        batch = draft_seam.input_batch(
            num_tokens=request.num_tokens,
            idx_mapping=self._tensor(request.idx_mapping),
            positions=self._tensor(request.positions),
            query_start_loc=self._tensor(request.query_start_loc),
            num_scheduled_tokens=request.num_scheduled_tokens,
            seq_lens_cpu_upper_bound=torch.from_numpy(request.seq_lens_cpu_upper_bound),
        )
        drafts: torch.Tensor = self._runner.speculator.propose(
            batch,
            None,
            None,
            hidden_states,
            None,  # no auxiliary states: these are fused already
            self._tensor(request.num_sampled),
            self._tensor(request.num_rejected),
            self._tensor(request.last_sampled),
            self._tensor(request.next_prefill_tokens),
            self._tensor(request.temperature),
            self._tensor(request.seeds),
            num_speculative_tokens=request.num_speculative_tokens,
        )
        return drafts

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._runner.device)
