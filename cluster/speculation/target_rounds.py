"""The two ways of a round from the target to its draft and back: as a message, or through device memory."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray

from cluster.channel import Channel, ChannelClosed, ChannelError
from cluster.channel.device import ANSWERED_OFFSET, MAX_ROUNDS_AHEAD, DeviceChannel, has_reached, word_of
from cluster.speculation.device_kernels import Copier, Copy, copy_of, take_reply
from cluster.speculation.messages import (
    DeviceLayout,
    Layout,
    MessageCodec,
    MessageError,
    ProposeReply,
    ProposeRequest,
    RoundNotice,
    max_notice_bytes,
)
from cluster.speculation.pace import Pace
from cluster.speculation.round import Round
from cluster.speculation.rounds import DraftClient, RoundTimes
from cluster.speculation.stream_marks import Mark
from cluster.speculation.stream_waits import StreamWaits
from cluster.speculation.watch import Watchdog

_AHEAD_POLL_S: Final = 1e-4

_TRITON_MULTIPLE: Final = 16
"""Triton compiles a kernel once more for integers that this divides."""


class TargetRounds(ABC):
    """One round at a time, in order: the draft must not write for a block's last owner after its next one began."""

    times: RoundTimes

    @abstractmethod
    def propose(self, round: Round, block_tables: Sequence[torch.Tensor], drafts: torch.Tensor) -> float | None:
        """Fill `drafts` [B, K], with the last known tokens where there is no proposal. `block_tables` are the round's
        rows [B, W] of each table that travels.

        Returns the seconds that the draft was waited for; those of the last round like this one where it is yet to be
        waited for, and None while that isn't known.

        Raises:
            ChannelError: the draft is gone, or late. There are no further rounds; `drafts` may be anything.
            MessageError: the round doesn't fit the agreed sizes, or what came is no answer to it.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Before any round: let the draft show that it answers. From any thread.

        Raises:
            ChannelError: it doesn't.
            MessageError: what it answers is of another contract.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the round that is waited for, from any thread; there is no other after it."""

    @abstractmethod
    def close(self) -> None: ...


class MessageRounds(TargetRounds):
    """Every tensor goes through the CPU, which waits for the device, and then for the draft."""

    def __init__(self, client: DraftClient) -> None:
        self.times = client.times
        self._client = client

    def propose(self, round: Round, block_tables: Sequence[torch.Tensor], drafts: torch.Tensor) -> float | None:
        round.propose_last(drafts)
        waited_s = self.times.round_trip
        answer = self._client.propose(_request(round, block_tables))
        if isinstance(answer, ProposeReply):
            drafts[:, : round.num_speculative_tokens].copy_(torch.from_numpy(answer.draft_token_ids))
        return self.times.round_trip - waited_s

    def warm_up(self) -> None:
        self._client.warm_up()

    def abort(self) -> None:
        self._client.abort()

    def close(self) -> None:
        self._client.close()


class DeviceRounds(TargetRounds):
    """Nothing here waits for the device or the draft: what waits is the stream, and a watchdog lets it go.

    So a draft's loss is known a round or more after the stream has gone on without it, and likewise what the stream
    waited. From that comes the pace by which a later round is overdue.
    """

    def __init__(
        self,
        channel: DeviceChannel,
        codec: MessageCodec,
        *,
        epoch: int,
        pace: Pace,
        device: torch.device,
        times: RoundTimes,
    ) -> None:
        self.times = times
        self._channel = channel
        self._codec = codec
        self._epoch = epoch
        self._pace = pace
        self._layout = DeviceLayout(codec.sizes)
        self._copier = Copier(device, max_copies=len(self._layout.tensors), num_tables=MAX_ROUNDS_AHEAD)
        self._notice = codec.encoder(memoryview(bytearray(max_notice_bytes(codec.sizes))))
        self._step = 0
        self._watchdog = Watchdog(channel)
        self._waits = StreamWaits(channel.new_event)
        self.mark: Callable[[Mark], None] = lambda _: None
        """Called where the stream's time is to be known."""

    def propose(self, round: Round, block_tables: Sequence[torch.Tensor], drafts: torch.Tensor) -> float | None:
        self._learn()
        kind = _kind_of(round)
        step, request = self._step + 1, self._layout.of(round.num_reqs, round.num_tokens)
        reply = self._layout.reply(round.num_reqs)
        copies = self._copies(request, round, block_tables)
        self._watchdog.begin(word_of(step), self._pace.allowed_s(round.num_tokens, kind))
        self._step = step
        self._wait_until_near()
        self.mark("begun")
        self._copier.copy(copies)
        self.mark("encoded")
        notice = self._notice.encode(self._notice_of(round))
        self._ask(notice, request.num_bytes, reply.end)
        self._waits.begin(round.num_tokens, kind)
        self._channel.await_reply(word_of(step))
        self._waits.end()
        self.mark("replied")
        take_reply(
            drafts,
            last_sampled=round.last_sampled,
            idx_mapping=round.idx_mapping,
            reply=self._channel.reply_address + reply.offset,
            answered=self._channel.reply_address + ANSWERED_OFFSET,
            step=step,
            wanted=round.num_speculative_tokens,
            vocab_size=self._codec.sizes.vocab_size,
        )
        self.mark("taken")
        self.times.rounds += 1
        self.times.request_bytes += len(notice) + sum(copy.num_bytes for copy in copies)
        self.times.reply_bytes += drafts.nbytes
        return self._pace.latest_s(round.num_tokens, kind)

    def warm_up(self) -> None:
        """Nothing: the draft has captured its graphs before it opened the channel."""

    def abort(self) -> None:
        self._watchdog.lose(ChannelClosed("this side closed the channel"))

    def close(self) -> None:
        """The stream is let go first, then waited for: it reads what is freed here."""
        self.abort()
        self._channel.synchronize()
        self._watchdog.stop()
        self._channel.close()

    def _learn(self) -> None:
        for wait in self._waits.passed():
            if self._watchdog.lost is None:  # or it may have ended without a reply
                self._pace.took(wait.num_tokens, wait.seconds, wait.kind)
            self.times.wait += wait.seconds

    def _ask(self, notice: memoryview, request_bytes: int, reply_bytes: int) -> None:
        try:
            self._channel.send([notice], time.monotonic() + self._pace.deadline_s)
            self._channel.request(word_of(self._step), request_bytes, reply_bytes)  # last: the draft's time begins
        except ChannelError as error:
            raise self._watchdog.lost or error from error  # the watchdog may have ended the channel, and knows why

    def _copies(self, request: Layout, round: Round, block_tables: Sequence[torch.Tensor]) -> list[Copy]:
        rows = {f"block_tables[{i}]": table for i, table in enumerate(block_tables)}
        rows |= {f"kv_rows[{i}]": of_layer for i, of_layer in enumerate(round.kv_rows)}
        copies = []
        for section in request.sections:
            name = section.tensor.name
            tensor = rows[name] if name in rows else getattr(round, name)
            if tensor.nbytes != section.num_bytes:
                found = f"{tensor.dtype}{list(tensor.shape)}"
                raise MessageError(f"{name} is {found}, the round sizes make it {section.num_bytes} bytes")
            if section.num_bytes:
                copies.append(copy_of(self._channel.request_address + section.offset, tensor))
        return copies

    def _notice_of(self, round: Round) -> RoundNotice:
        return RoundNotice(
            epoch=self._epoch,
            step=self._step,
            num_tokens=round.num_tokens,
            num_speculative_tokens=round.num_speculative_tokens,
            decode_graph_eligible=round.decode_graph_eligible,
            query_start_loc=round.query_start_loc_np,
            num_scheduled_tokens=round.num_scheduled_tokens,
            seq_lens_cpu_upper_bound=_array(round.seq_lens_cpu_upper_bound),
        )

    def _wait_until_near(self) -> None:
        """The stream reads the tables of copies, here and at the draft: the CPUs may not run too far ahead of it."""
        oldest = self._step - MAX_ROUNDS_AHEAD
        while oldest > 0 and not has_reached(self._channel.replied, word_of(oldest)):
            time.sleep(_AHEAD_POLL_S)


def target_rounds(
    channel: Channel, codec: MessageCodec, *, epoch: int, pace: Pace, device: torch.device, times: RoundTimes
) -> TargetRounds:
    """`pace` says how long a round may take, from when it is sent to its answer; `times` are added to."""
    if isinstance(channel, DeviceChannel):
        # Its draft is in a process that is new, compiles again, and hasn't been warmed up by rounds of nobody's.
        return DeviceRounds(channel, codec, epoch=epoch, pace=pace.anew(), device=device, times=times)
    return MessageRounds(DraftClient(channel, codec, epoch=epoch, pace=pace, times=times))


def _kind_of(round: Round) -> Hashable:
    """What decides, beside its length, which kernels the draft runs for a round: one that it hasn't run yet is compiled
    first, and that takes longer than a draft may hang."""
    return (
        round.num_reqs.bit_length(),
        round.num_reqs % _TRITON_MULTIPLE == 0,
        round.num_tokens % _TRITON_MULTIPLE == 0,
        round.num_speculative_tokens,
        round.decode_graph_eligible,
    )


def _request(round: Round, block_tables: Sequence[torch.Tensor]) -> ProposeRequest:
    return ProposeRequest(
        num_speculative_tokens=round.num_speculative_tokens,
        decode_graph_eligible=round.decode_graph_eligible,
        hidden_states=_array(round.hidden_states),
        positions=_array(round.positions),
        query_start_loc=_array(round.query_start_loc),
        idx_mapping=_array(round.idx_mapping),
        num_scheduled_tokens=round.num_scheduled_tokens,
        seq_lens_cpu_upper_bound=_array(round.seq_lens_cpu_upper_bound),
        num_sampled=_array(round.num_sampled),
        num_rejected=_array(round.num_rejected),
        last_sampled=_array(round.last_sampled),
        next_prefill_tokens=_array(round.next_prefill_tokens),
        temperature=_array(round.temperature),
        seeds=_array(round.seeds),
        block_tables=tuple(map(_array, block_tables)),
        input_ids=None if round.input_ids is None else _array(round.input_ids),
        kv_rows=tuple(map(_array, round.kv_rows)),
    )


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)  # numpy has no bfloat16
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
