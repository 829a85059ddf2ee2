"""The draft's side of the split: vLLM's own speculator, fed with a target's rounds."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import UserError
from cluster.speculation import draft_seam
from cluster.speculation.families import FAMILIES
from cluster.speculation.handshake import Allocated, EngineSizes, PoolSizes, TargetGroup
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
                "block_size": sizes.block_size,
            }
        )
        self._runner = draft_seam.runner_of(self._executor)
        self._family = FAMILIES[self._runner.speculator.method]
        _require_equal(sizes, draft_seam.engine_sizes(self._executor))

    def allocate(self, pool: PoolSizes) -> Allocated:
        """Allocate as many blocks as the target has.

        Raises:
            UserError: no block table of the target fits a group of the draft.
        """
        with torch.inference_mode():
            draft_seam.allocate(self._executor, pool.num_blocks)
        tables = tuple(_table_for(group, pool.groups) for group in draft_seam.draft_groups(self._runner))
        if len(set(tables)) < len(tables):
            raise UserError(
                "the draft's KV-cache groups",
                "two of them would follow one block table of the target, and write to the same blocks",
                "use --placement colocated",
            )
        return Allocated(num_blocks=pool.num_blocks, tables=tables)

    def propose(self, request: ProposeRequest) -> NDArray[np.int64]:
        """The drafts [B, K] of a round. The request's arrays are read before this returns, never kept."""
        with torch.inference_mode():
            drafts = self._propose(request)
        ids: NDArray[np.int64] = drafts[:, : request.num_speculative_tokens].cpu().numpy()
        return ids

    def _propose(self, request: ProposeRequest) -> torch.Tensor:
        idx_mapping = self._tensor(request.idx_mapping)
        draft_seam.write_block_tables(self._runner, idx_mapping, [self._tensor(rows) for rows in request.block_tables])
        hidden_states = self._tensor(request.hidden_states)
        if hidden_states.dtype == torch.uint16:
            hidden_states = hidden_states.view(torch.bfloat16)
        batch = draft_seam.input_batch(
            idx_mapping=idx_mapping,
            input_ids=None if request.input_ids is None else self._tensor(request.input_ids),
            positions=self._tensor(request.positions),
            query_start_loc=self._tensor(request.query_start_loc),
            query_start_loc_np=request.query_start_loc,
            num_scheduled_tokens=request.num_scheduled_tokens,
            seq_lens_cpu_upper_bound=torch.from_numpy(request.seq_lens_cpu_upper_bound),
            decode_graph_eligible=request.decode_graph_eligible,
        )
        attention = draft_seam.attention(self._runner, batch) if self._family.reuses_attention else (None, None)
        drafts: torch.Tensor = self._runner.speculator.propose(
            batch,
            *attention,
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


def _table_for(group: TargetGroup, targets: tuple[TargetGroup, ...]) -> int:
    """The target's table that a draft's group follows: of its own kind, or else one that never drops a block."""
    for kind in (group.kind, "FullAttentionSpec"):
        for index, target in enumerate(targets):
            same_shape = (target.block_size, target.table_width) == (group.block_size, group.table_width)
            if target.kind == kind and same_shape:
                return index
    raise UserError(
        f"the draft's KV-cache group {group}",
        f"none of the target's has the same blocks and tables: {', '.join(map(str, targets))}",
        "give both the same block size, or use --placement colocated",
    )


def _require_equal(wanted: EngineSizes, built: EngineSizes) -> None:
    if wanted != built:
        raise UserError(
            f"the draft's engine was built as {built}",
            f"the target's is {wanted}",
            "give both the same method, K and lengths",
        )
