"""The draft's end of both ways of a round: as a message, or through device memory."""

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.channel import Channel, ChannelError
from cluster.channel.device import MAX_ROUNDS_AHEAD, DeviceChannel, word_of
from cluster.speculation.device_kernels import Copier, Copy, copy_into, copy_of
from cluster.speculation.hosted import HostedSpeculator
from cluster.speculation.message_server import serve
from cluster.speculation.messages import (
    DeviceLayout,
    Layout,
    MessageCodec,
    MessageError,
    ProposeRequest,
    RoundNotice,
    RoundSizes,
    max_notice_bytes,
)
from cluster.speculation.round import Round

_STATES: Final = ("hidden_states", "kv_rows[")
"""Tensors of the model's type, which numpy doesn't have."""


def serve_rounds(hosted: HostedSpeculator, channel: Channel, codec: MessageCodec, *, epoch: int) -> str:
    """Answer rounds until the channel ends; returns why it did."""
    if isinstance(channel, DeviceChannel):
        return DeviceDraft(hosted, channel, codec, epoch=epoch).serve()
    return serve(MessageDraft(hosted), channel, codec, epoch=epoch)


class MessageDraft:
    """The CPU waits for the drafts, and sends them."""

    def __init__(self, hosted: HostedSpeculator) -> None:
        self._hosted = hosted

    def propose(self, request: ProposeRequest) -> NDArray[np.int64]:
        """The drafts [B, K]. The request's arrays are read before this returns, never kept."""
        with torch.inference_mode():  # in which vLLM has made the tables
            for tables, rows in zip(self._hosted.block_tables, request.block_tables, strict=True):
                for table in tables:
                    table[: request.num_reqs].copy_(torch.from_numpy(rows))
        drafts = self._hosted.propose(self._round(request))
        ids: NDArray[np.int64] = drafts[:, : request.num_speculative_tokens].cpu().numpy()
        return ids

    def _round(self, request: ProposeRequest) -> Round:
        return Round(
            num_speculative_tokens=request.num_speculative_tokens,
            decode_graph_eligible=request.decode_graph_eligible,
            query_start_loc_np=request.query_start_loc,
            num_scheduled_tokens=request.num_scheduled_tokens,
            seq_lens_cpu_upper_bound=torch.from_numpy(request.seq_lens_cpu_upper_bound),
            hidden_states=self._states(request.hidden_states),
            positions=self._tensor(request.positions),
            query_start_loc=self._tensor(request.query_start_loc),
            idx_mapping=self._tensor(request.idx_mapping),
            num_sampled=self._tensor(request.num_sampled),
            num_rejected=self._tensor(request.num_rejected),
            last_sampled=self._tensor(request.last_sampled),
            next_prefill_tokens=self._tensor(request.next_prefill_tokens),
            temperature=self._tensor(request.temperature),
            seeds=self._tensor(request.seeds),
            input_ids=None if request.input_ids is None else self._tensor(request.input_ids),
            kv_rows=tuple(map(self._states, request.kv_rows)),
        )

    def _states(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = self._tensor(array)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._hosted.device)


class DeviceDraft:
    """The CPU only puts work on the stream: one copy kernel in, the draft, one copy kernel out.

    What the CPU knows of a round is checked as any message is. What only the device knows (positions, slots, counts,
    block ids) is not: it comes from the target's own buffers, whose kernels index by it unchecked, too.
    """

    def __init__(self, hosted: HostedSpeculator, channel: DeviceChannel, codec: MessageCodec, *, epoch: int) -> None:
        self._hosted = hosted
        self._channel = channel
        self._codec = codec
        self._epoch = epoch
        self._layout = DeviceLayout(codec.sizes)
        self._inputs = _inputs(self._layout, codec.sizes, hosted)
        num_copies = sum(map(len, self._inputs.values()))
        # The target is no further ahead of its own stream, and so of this one, than this.
        self._copier_in = Copier(hosted.device, max_copies=num_copies, num_tables=MAX_ROUNDS_AHEAD + 1)
        self._copier_out = Copier(hosted.device, max_copies=1, num_tables=MAX_ROUNDS_AHEAD + 1)

    def serve(self) -> str:
        """Until the channel ends, or a notice isn't one of this pair: then the target goes on without this draft."""
        buffer = memoryview(bytearray(max_notice_bytes(self._codec.sizes)))
        while True:
            try:
                num_bytes = self._channel.recv(buffer, math.inf)
                gone = self._channel.gone()
                if gone is not None:  # nobody waits for this round any more, and its buffers may be gone
                    return str(gone)
                notice = self._codec.decode(buffer[:num_bytes])
                if not isinstance(notice, RoundNotice) or notice.epoch != self._epoch:
                    return f"a {type(notice).__name__} of epoch {notice.epoch} came in epoch {self._epoch}"
                self._answer(notice)
            except (ChannelError, MessageError) as error:
                return str(error)

    def _answer(self, notice: RoundNotice) -> None:
        step, request = word_of(notice.step), self._layout.of(notice.num_reqs, notice.num_tokens)
        reply = self._layout.reply(notice.num_reqs)
        self._channel.await_request(step, request.num_bytes)
        self._copier_in.copy(self._copies(request))
        drafts = self._hosted.propose(self._round(notice))
        self._copier_out.copy([copy_of(self._channel.reply_address + reply.offset, drafts)])
        self._channel.reply(step, reply.end)

    def _copies(self, request: Layout) -> list[Copy]:
        return [
            copy_into(tensor, self._channel.request_address + section.offset, section.num_bytes)
            for section in request.sections
            if section.num_bytes
            for tensor in self._inputs[section.tensor.name]
        ]

    def _round(self, notice: RoundNotice) -> Round:
        """Of views: each round is copied to where the last one was."""
        T, B = notice.num_tokens, notice.num_reqs
        inputs = {name: tensors[0] for name, tensors in self._inputs.items()}
        return Round(
            num_speculative_tokens=notice.num_speculative_tokens,
            decode_graph_eligible=notice.decode_graph_eligible,
            # Copies: the next notice comes into the same buffer, perhaps before vLLM's copies to the device are made.
            query_start_loc_np=notice.query_start_loc.copy(),
            num_scheduled_tokens=notice.num_scheduled_tokens.copy(),
            seq_lens_cpu_upper_bound=torch.from_numpy(notice.seq_lens_cpu_upper_bound.copy()),
            hidden_states=inputs["hidden_states"][:T],
            positions=inputs["positions"][:T],
            query_start_loc=inputs["query_start_loc"][: B + 1],
            idx_mapping=inputs["idx_mapping"][:B],
            num_sampled=inputs["num_sampled"][:B],
            num_rejected=inputs["num_rejected"][:B],
            last_sampled=inputs["last_sampled"],
            next_prefill_tokens=inputs["next_prefill_tokens"],
            temperature=inputs["temperature"],
            seeds=inputs["seeds"],
            input_ids=inputs["input_ids"][:T] if "input_ids" in inputs else None,
            kv_rows=tuple(inputs[f"kv_rows[{i}]"][:T] for i in range(len(self._codec.sizes.kv_row_sizes))),
        )


def _inputs(layout: DeviceLayout, sizes: RoundSizes, hosted: HostedSpeculator) -> dict[str, tuple[torch.Tensor, ...]]:
    """Where each tensor of a round is copied to: the draft's own block tables, and buffers for the rest."""
    inputs: dict[str, tuple[torch.Tensor, ...]] = {
        f"block_tables[{i}]": tables for i, tables in enumerate(hosted.block_tables)
    }
    for tensor in layout.tensors:
        if tensor.name not in inputs:
            name = sizes.hidden_dtype if tensor.name.startswith(_STATES) else tensor.dtype.name
            buffer = torch.empty(tensor.shape, dtype=getattr(torch, name), device=hosted.device)
            inputs[tensor.name] = (buffer,)
    return inputs
