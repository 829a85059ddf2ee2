"""The target's side of the split: a speculator that asks another process for its drafts."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from dspark.v1.control_pb2 import RoundOptions, SharedKV

from cluster.channel import ChannelError
from cluster.channel.faults import Faults
from cluster.contract.contract import KVContract
from cluster.control.member import Member
from cluster.engine.tracing import range_of
from cluster.errors import UserError
from cluster.speculation import target_seam
from cluster.speculation.families import FAMILIES
from cluster.speculation.handshake import mirrored_layers, tables_to_send
from cluster.speculation.messages import MessageError
from cluster.speculation.pace import Pace
from cluster.speculation.pairing import offer_rounds
from cluster.speculation.rejoin import Rejoin
from cluster.speculation.round import Round
from cluster.speculation.rounds import RoundReport, RoundTimes
from cluster.speculation.settings import remote_draft_settings
from cluster.speculation.target_rounds import TargetRounds, target_rounds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDraft:
    """One incarnation of the draft, which answers rounds."""

    epoch: int
    rounds: TargetRounds


class RemoteSpeculator(target_seam.DraftlessSpeculator):
    """Ships `propose`'s arguments and returns the answer. Of the draft it holds nothing but `fc`, and no KV cache.

    From the first trouble with a draft on, no round has a proposal, and the target goes on alone, until `keep_paired`
    has found another one, or the same again, and the engine has come to its epoch (`follow`): trouble is said in the
    log, and never raised into the engine. No proposal means that every draft is the last known token. -1, by
    which the rejection sampler knows an invalid draft, would be looked up in the target's embedding first
    (`combine_sampled_and_draft_tokens`); and any token is exact where a draft is a token without probabilities.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._check_supported()
        self._family = FAMILIES[self.method]
        self._settings = remote_draft_settings(vllm_config.additional_config)
        self._draft: PairedDraft | None = None
        self._next: PairedDraft | None = None
        self._last_epoch = 0
        self._rejoin: Rejoin[PairedDraft] | None = None
        self._shared_kv: SharedKV | None = None
        self._stored: target_seam.StoredRows | target_seam.PageRows | None = None
        self._times = RoundTimes()
        self._pace = Pace(deadline_s=self._settings.round_deadline_s, stall_limit_s=self._settings.stall_limit_s)
        self.faults = Faults(self._settings.faults, "target")
        self._lost: str | None = None
        self._losses = 0
        self._rests = False
        self._rests_so_far = 0
        self.asked = False
        """Whether the last step asked its draft."""
        self.last_round_s: float | None = None
        """What it waited for it, as of `TargetRounds.propose`; None where that isn't known."""

    @property
    def lost(self) -> str | None:
        """Why there are no proposals now, or None while there are."""
        return self._lost

    @property
    def rounds(self) -> TargetRounds | None:
        """Of the draft that answers; None while there is none."""
        return None if self._draft is None else self._draft.rounds

    @property
    def draft_epoch(self) -> int:
        """Of the draft that answers, or would in a step of its epoch; 0 while there is none."""
        draft = self._next or self._draft
        return 0 if draft is None else draft.epoch

    @property
    def report(self) -> RoundReport:
        """How this target stands with its draft."""
        return RoundReport(
            times=self._times,
            epoch=self._last_epoch,
            lost=self._lost is not None,
            losses=self._losses,
            resting=self._rests,
            rests=self._rests_so_far,
        )

    @property
    def times(self) -> RoundTimes:
        """What the rounds so far took, with all drafts."""
        return self._times

    def begin(self, draft: PairedDraft) -> None:
        """The first one, before any step."""
        self._draft = draft
        self._last_epoch = draft.epoch

    def keep_paired(self, pair_again: Callable[[], PairedDraft]) -> None:
        """Whenever a draft is lost, let `pair_again` find another one, in a thread of its own."""
        self._rejoin = Rejoin(end=lambda old: old.rounds.close(), pair_again=pair_again, offer=self._offer)

    def follow(self, asked_epoch: int | None) -> None:
        """Before a step: the epoch of the draft that it asks, in which its requests were computed; 0 for none, None for
        whichever was the first."""
        self._rests_so_far += asked_epoch == 0 and not self._rests
        self._rests = asked_epoch == 0
        if self._next is None or asked_epoch != self._next.epoch:
            return
        self._draft, self._next = self._next, None
        self._last_epoch = self._draft.epoch
        self._lost = None
        log.warning("speculation resumes, in epoch %d", self._last_epoch)

    def close(self) -> None:
        """End the pair for good: further rounds have no proposal."""
        if self._rejoin is not None:
            self._rejoin.stop()
            self._rejoin = None
        for draft in (self._draft, self._next):
            if draft is not None:
                draft.rounds.close()
        self._draft = self._next = None

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
            self._stored = target_seam.kv_rows(self.vllm_config, mirrored, self.device)

    def open_rounds(self, member: Member, contract: KVContract) -> PairedDraft:
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
        channel, codec = offer_rounds(self._settings, member, contract, options)
        with ExitStack() as held:
            held.callback(channel.close)  # or the draft would wait in it for as long as this process lives
            rounds = target_rounds(
                self.faults.around(channel),
                codec,
                epoch=member.epoch,
                pace=self._pace,
                device=self.device,
                times=self._times,
            )
            held.pop_all()
        member.on_silent_peer(rounds.abort)
        return PairedDraft(epoch=member.epoch, rounds=rounds)

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
        """This round's drafts [B, K], in a buffer of this object's, and in those of all tensor-parallel ranks."""
        drafts = self.draft_tokens[: input_batch.num_reqs]
        if dummy_run or is_profile:
            return drafts.zero_()
        draft, self.last_round_s = self._draft, None
        self.asked = draft is not None and not self._rests
        if draft is None or self._rests:
            return self.of_first_rank(drafts.copy_(last_sampled[input_batch.idx_mapping]))
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
            kv_rows=() if self._stored is None else self._stored.take(T, slot_mappings),
        )
        tables = self._block_tables.input_block_tables
        try:
            with range_of("round"):
                self.last_round_s = draft.rounds.propose(round, [tables[i][:B] for i in self._tables], drafts)
        except (ChannelError, MessageError) as error:
            self._lose(draft, error)
            round.propose_last(drafts)
        return self.of_first_rank(drafts)

    def _states(
        self, last_hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None, num_tokens: int
    ) -> torch.Tensor:
        """What the draft reads of the target's states: [T, H], or [T, 0] where it reads none."""
        if self._family.states == "last":
            return last_hidden_states[:num_tokens]
        if self._family.states is None:
            return torch.empty(num_tokens, 0, dtype=self.dtype, device=self.device)
        begun = time.perf_counter()
        with range_of("fuse"):
            states: torch.Tensor = self.model(aux_hidden_states)[:num_tokens]
        self._times.fuse += time.perf_counter() - begun
        return states

    def _lose(self, draft: PairedDraft, error: Exception) -> None:
        """The draft's KV cache misses this round now: it can't serve a later one in this epoch."""
        log.warning("the draft is lost, the target goes on without proposals: %s", error)
        self._lost = str(error)
        self._losses += 1
        self._draft = None
        self._retire(draft)

    def _retire(self, draft: PairedDraft) -> None:
        if self._rejoin is None:
            draft.rounds.close()
            return
        draft.rounds.abort()  # now, as far as both sides see; what takes time is the thread's
        self._rejoin.lost(draft)

    def _offer(self, draft: PairedDraft) -> None:
        self._next = draft

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
