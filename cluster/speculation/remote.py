"""The target's side of the split: a speculator that asks another process for its drafts."""

import logging
import time
from typing import Any, Final

import torch
from dspark.v1.control_pb2 import RoundOptions
from numpy.typing import NDArray

from cluster.channel import ChannelError
from cluster.contract.contract import KVContract
from cluster.control.member import Member
from cluster.errors import UserError
from cluster.speculation import target_seam
from cluster.speculation.handshake import tables_to_send
from cluster.speculation.messages import MessageError, ProposeReply, ProposeRequest
from cluster.speculation.pairing import offer_rounds
from cluster.speculation.rounds import DraftClient, RoundTimes
from cluster.speculation.settings import remote_draft_settings

SUPPORTED_METHODS: Final = ("dspark", "dflash")

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
        self.attn_groups: list[Any] = []  # the runner asks for the draft's: there are none here
        self._draft: DraftClient | None = None
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
        if self._draft is not None:
            self._draft.close()
            self._draft = None

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_seam.FusedStates(self.vllm_config, self.device)

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
        )
        settings = remote_draft_settings(self.vllm_config.additional_config)
        self._draft = offer_rounds(settings, member, contract, options)
        member.on_silent_peer(self._draft.abort)
        self._times = self._draft.times

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
        drafts.copy_(last_sampled[input_batch.idx_mapping])
        if self._draft is None:
            return drafts
        T, B = input_batch.num_tokens, input_batch.num_reqs
        K = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        request = ProposeRequest(
            epoch=0,
            step=0,
            num_speculative_tokens=K,
            decode_graph_eligible=bool(input_batch.decode_graph_eligible),
            hidden_states=self._fuse(aux_hidden_states)[:T],
            positions=_array(input_batch.positions[:T]),
            query_start_loc=_array(input_batch.query_start_loc[: B + 1]),
            idx_mapping=_array(input_batch.idx_mapping[:B]),
            num_scheduled_tokens=input_batch.num_scheduled_tokens,
            seq_lens_cpu_upper_bound=_array(input_batch.seq_lens_cpu_upper_bound[:B]),
            num_sampled=_array(num_sampled),
            num_rejected=_array(num_rejected),
            last_sampled=_array(last_sampled),
            next_prefill_tokens=_array(next_prefill_tokens),
            temperature=_array(temperature),
            seeds=_array(seeds),
            block_tables=tuple(_array(self._block_tables.input_block_tables[i][:B]) for i in self._tables),
        )
        try:
            answer = self._draft.propose(request)
        except (ChannelError, MessageError) as error:
            self._lose(error)
            return drafts
        if isinstance(answer, ProposeReply):
            drafts[:, :K].copy_(torch.from_numpy(answer.draft_token_ids))
        return drafts

    def _fuse(self, aux_hidden_states: list[torch.Tensor] | None) -> NDArray[Any]:
        begun = time.perf_counter()
        fused = self.model(aux_hidden_states)
        if fused.dtype == torch.bfloat16:
            fused = fused.view(torch.uint16)  # numpy has no bfloat16
        states = _array(fused)
        self._times.fuse += time.perf_counter() - begun
        return states

    def _lose(self, error: Exception) -> None:
        """The draft's KV cache misses this round now: it can't serve a later one."""
        log.warning("the draft is lost, the target goes on without proposals: %s", error)
        self._lost = str(error)
        self.close()

    def _check_supported(self) -> None:
        if self.method not in SUPPORTED_METHODS:
            raise UserError(
                f"speculation method {self.method}",
                f"a draft in a process of its own can be {' or '.join(SUPPORTED_METHODS)} so far",
                "use --placement colocated",
            )
        if self.draft_logits is not None:
            raise UserError(
                "draft_sample_method probabilistic",
                "a draft in a process of its own returns tokens, not logits, so far",
                "use greedy drafts, or --placement colocated",
            )
        if self.enable_adaptive_verification:
            raise UserError(
                "enable_adaptive_verification",
                "a draft in a process of its own returns no confidences so far",
                "leave it out, or use --placement colocated",
            )


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
