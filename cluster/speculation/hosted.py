"""The draft's side of the split: vLLM's own speculator, fed with a target's rounds."""

from typing import Any

import torch
from dspark.v1.control_pb2 import EngineSizes, SharedKV

from cluster.contract.contract import KVContract
from cluster.control.member import Member
from cluster.engine.tracing import range_of
from cluster.speculation import draft_seam
from cluster.speculation.families import FAMILIES
from cluster.speculation.handshake import tables_to_follow
from cluster.speculation.round import Round
from cluster.speculation.target_kv import TargetKV


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
        self._family = FAMILIES[self._runner.speculator.method]
        self._tables: tuple[int, ...] = ()
        self._contract: KVContract | None = None
        self._target_kv: TargetKV | None = None
        self._last_position: int | None = None
        """Of a draft with a shorter context than its target's: it has no embedding of a later one, and would read past
        the end of its table. What it drafts there is of a wrong place, and in a request that has come so far alone."""

    def allocate(self, member: Member) -> KVContract:
        """Negotiate the KV contract with the target, and allocate what it says.

        Raises:
            ContractError, ControlError, ContractViolation: there is no contract, or it can't be kept.
        """
        with torch.inference_mode():
            contract = draft_seam.allocate(self._executor, member)
        self._tables = tables_to_follow(contract, draft_seam.layers_by_group(self._runner))
        self._contract = contract
        if contract.draft.max_model_len < contract.target.max_model_len:
            self._last_position = contract.draft.max_model_len - 1 - contract.wire.num_speculative_tokens
        return contract

    def pair_again(self, member: Member) -> KVContract:
        """Come into another pairing, with what is loaded and allocated. The KV cache keeps what is in it, which no
        request of the new epoch reads.

        Raises:
            ContractError, ControlError: the target would need another contract, or is lost again.
        """
        return draft_seam.pair_again(self._executor, member)

    def take_kv(self, shared: SharedKV) -> None:
        """Read the target's KV, which it has allocated by now. Before the first round of each pairing; graphs that read
        its pages are captured here, so that a GPU's are of one pairing.

        Raises:
            ContractError, ChannelUnavailable: it isn't as contracted, or can't be reached.
        """
        assert self._contract is not None  # allocate
        self._target_kv = TargetKV(self._executor.vllm_config, self._contract, shared, self.device)
        if self._contract.kv_sharing == "map":
            draft_seam.capture(self._runner)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Columns of the block tables, one for each that the target sends."""
        widths = draft_seam.block_table_widths(self._runner)
        return tuple(widths[self._tables.index(table)] for table in range(len(set(self._tables))))

    @property
    def device(self) -> torch.device:
        device: torch.device = self._runner.device
        return device

    @property
    def block_tables(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """For each table that travels, the draft's own tables [R, W] that follow it. The rows of a round go into their
        first ones, where captured graphs read them."""
        own = draft_seam.input_block_tables(self._runner)
        travelling = range(len(set(self._tables)))
        return tuple(
            tuple(table for table, followed in zip(own, self._tables, strict=True) if followed == one)
            for one in travelling
        )

    def capture(self) -> None:
        """Capture the draft's CUDA graphs, where the engine has any; takes half a minute. Once, after `allocate`; those
        of a draft that maps its target's pages `take_kv` captures."""
        assert self._contract is not None  # allocate
        if self._contract.kv_sharing != "map":
            draft_seam.capture(self._runner)

    def propose(self, round: Round) -> torch.Tensor:
        """The drafts [B, K] of a round whose rows of block tables are in their place, in a buffer of the speculator's.

        Waits for nothing, and keeps none of the round's tensors.
        """
        with torch.inference_mode(), draft_seam.lane(self._runner), range_of("draft"):
            if self._last_position is not None:
                round.positions.clamp_(max=self._last_position)
            draft_seam.settle_block_tables(self._runner, round.idx_mapping)
            batch = draft_seam.input_batch(
                idx_mapping=round.idx_mapping,
                input_ids=round.input_ids,
                positions=round.positions,
                query_start_loc=round.query_start_loc,
                query_start_loc_np=round.query_start_loc_np,
                num_scheduled_tokens=round.num_scheduled_tokens,
                seq_lens_cpu_upper_bound=round.seq_lens_cpu_upper_bound,
                decode_graph_eligible=round.decode_graph_eligible,
                with_seq_lens=self._family.reads_input_ids,
            )
            metadata, slot_mappings = None, None
            if self._family.reuses_attention:
                metadata, slot_mappings = draft_seam.attention(self._runner, batch)
                if self._target_kv is not None:
                    self._target_kv.store(round.kv_rows, slot_mappings)
            drafts: torch.Tensor = self._runner.speculator.propose(
                batch,
                metadata,
                slot_mappings,
                round.hidden_states,
                None,  # no auxiliary states: these are fused already
                round.num_sampled,
                round.num_rejected,
                round.last_sampled,
                round.next_prefill_tokens,
                round.temperature,
                round.seeds,
                num_speculative_tokens=round.num_speculative_tokens,
            )
        return drafts
