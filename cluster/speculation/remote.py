"""The target's side of the split: a speculator that asks another process for its drafts."""

import logging
import time
from typing import Any

import torch
from dspark.v1.control_pb2 import RoundOptions, SharedKV

from cluster.channel import ChannelError
from cluster.contract.contract import KVContract
from cluster.control.member import Member
from cluster.errors import UserError
from cluster.speculation import target_seam
from cluster.speculation.families import FAMILIES
from cluster.speculation.handshake import mirrored_layers, tables_to_send
from cluster.speculation.messages import MessageError
from cluster.speculation.pairing import offer_rounds
from cluster.speculation.round import Round
from cluster.speculation.rounds import RoundTimes
from cluster.speculation.settings import remote_draft_settings
from cluster.speculation.target_rounds import TargetRounds, target_rounds

log = logging.getLogger(__name__)


class RemoteSpeculator(target_seam.DraftModelSpeculator):
    """Ships `propose`'s arguments and returns the answer. Of the draft it holds nothing but `fc`, and no KV cache.

    From the first trouble with the draft on, no round has a proposal, and the target goes on alone: trouble is said
    in the log, and never raised into the engine. No proposal means that every draft is the last known token. -1, by
    which the rejection sampler knows an invalid draft, would be looked up in the target's embedding first
    (`combine_sampled_and_draft_tokens`); and any token is exact where a draft is a token without probabilities.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._check_supported()
        self._family = FAMILIES[self.method]
        self.attn_groups: list[Any] = []  # the runner asks for the draft's: there are none here
        self._rounds: TargetRounds | None = None
        self._shared_kv: SharedKV | None = None
        self._stored: target_seam.StoredRows | None = None
        self._times = RoundTimes()
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        """Why there are no proposals any more, or None while there are."""
        return self._lost

    @property
    def times(self) -> RoundTimes:
        """What the rounds so far took."""
        return self._times

    def close(self) -> None:
        """End the pair: the draft's process stops, and further rounds have no proposal."""
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        if self._family.states != "fused":
            return torch.nn.Module()
        return target_seam.FusedStates(self.vllm_config, target_model, self.device)

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Nothing here attends: only the target's block tables are kept, whose rows travel."""
        self._block_tables = block_tables
        self._layers_by_group = [group.layer_names for group in kv_cache_config.kv_cache_groups]

    def share_kv(self, contract: KVContract, shared: SharedKV) -> None:
        """The draft reads the target's KV, which is allocated: `shared` says where. Before the rounds are opened."""
        self._shared_kv = shared
        if mirrored := mirrored_layers(contract):
            self._stored = target_seam.StoredRows(self.vllm_config, mirrored)

    def open_rounds(self, member: Member, contract: KVContract) -> None:
        """Open the channel to the draft. For the target's worker, once both sides hold what the contract says.

        Raises:
            ContractError, ControlError: the draft doesn't open it.
        """
        self._tables = tables_to_send(contract, self._layers_by_group)
        tables = self._block_tables.input_block_tables
        options = RoundOptions(
            block_table_widths=[tables[i].shape[1] for i in self._tables],
            num_prefill_lookahead=max(1, self.vllm_config.num_prefill_lookahead_tokens),
            with_input_ids=self._family.reads_input_ids,
            shared_kv=self._shared_kv,
        )
        settings = remote_draft_settings(self.vllm_config.additional_config)
        channel, codec = offer_rounds(settings, member, contract, options)
        self._rounds = target_rounds(
            channel, codec, epoch=member.epoch, deadline_s=settings.round_deadline_s, device=self.device
        )
        member.on_silent_peer(self._rounds.abort)
        self._times = self._rounds.times

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing here is captured."""

    def capture(self) -> None:
        """Nothing here is captured."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """This round's drafts [B, K], in a buffer of this object's."""
        drafts = self.draft_tokens[: input_batch.num_reqs]
        if dummy_run or is_profile:
            return drafts.zero_()
        if self._rounds is None:
            return drafts.copy_(last_sampled[input_batch.idx_mapping])
        T, B = input_batch.num_tokens, input_batch.num_reqs
        K = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        round = Round(
            num_speculative_tokens=K,
            decode_graph_eligible=bool(input_batch.decode_graph_eligible),
            query_start_loc_np=input_batch.query_start_loc_np[: B + 1],
            num_scheduled_tokens=input_batch.num_scheduled_tokens,
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound[:B],
            hidden_states=self._states(last_hidden_states, aux_hidden_states, T),
            positions=input_batch.positions[:T],
            query_start_loc=input_batch.query_start_loc[: B + 1],
            idx_mapping=input_batch.idx_mapping[:B],
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            last_sampled=last_sampled,
            next_prefill_tokens=next_prefill_tokens,
            temperature=temperature,
            seeds=seeds,
            input_ids=input_batch.input_ids[:T] if self._family.reads_input_ids else None,
            kv_rows=() if self._stored is None else self._stored.take(T),
        )
        tables = self._block_tables.input_block_tables
        try:
            self._rounds.propose(round, [tables[i][:B] for i in self._tables], drafts)
        except (ChannelError, MessageError) as error:
            self._lose(error)
            round.propose_last(drafts)
        return drafts

    def _states(
        self, last_hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None, num_tokens: int
    ) -> torch.Tensor:
        """What the draft reads of the target's states: [T, H], or [T, 0] where it reads none."""
        if self._family.states == "last":
            return last_hidden_states[:num_tokens]
        if self._family.states is None:
            return torch.empty(num_tokens, 0, dtype=self.dtype, device=self.device)
        begun = time.perf_counter()
        states: torch.Tensor = self.model(aux_hidden_states)[:num_tokens]
        self._times.fuse += time.perf_counter() - begun
        return states

    def _lose(self, error: Exception) -> None:
        """The draft's KV cache misses this round now: it can't serve a later one."""
        log.warning("the draft is lost, the target goes on without proposals: %s", error)
        self._lost = str(error)
        self.close()

    def _check_supported(self) -> None:
        if self.method not in FAMILIES or (self.method == "mtp" and not self.speculative_config.use_gemma4_mtp()):
            raise UserError(
                f"speculation method {self.method}",
                f"a draft in a process of its own can be {', '.join(FAMILIES)}",
                "use --placement colocated",
            )
        if self.draft_logits is not None:
            raise UserError(
                "draft_sample_method probabilistic",
                "to verify sampled drafts takes the draft's logits, and only tokens come back from its process",
                "use greedy drafts, or --placement colocated",
            )
        if self.enable_adaptive_verification:
            raise UserError(
                "enable_adaptive_verification",
                "a draft in a process of its own returns no confidences so far",
                "leave it out, or use --placement colocated",
            )
