"""Messages to bytes and back, both in place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.speculation.messages.bounds import Bounds
from cluster.speculation.messages.errors import MessageError
from cluster.speculation.messages.header import (
    DIGEST_BYTES,
    DRAFT_TIME_OFFSET,
    HEADER_BYTES,
    Fingerprint,
    Header,
    Kind,
    read_draft_time,
    read_header,
    write_header,
)
from cluster.speculation.messages.layout import Layout
from cluster.speculation.messages.notice import (
    RoundNotice,
    notice_arrays,
    notice_from,
    notice_header,
    notice_layout,
)
from cluster.speculation.messages.reply import (
    NoProposal,
    ProposeReply,
    check_reply_header,
    max_reply_bytes,
    no_proposal_from,
    no_proposal_header,
    reply_from,
    reply_header,
    reply_layout,
)
from cluster.speculation.messages.request import (
    ProposeRequest,
    check_request_header,
    max_request_bytes,
    request_arrays,
    request_from,
    request_header,
    request_layout,
)
from cluster.speculation.messages.sizes import RoundSizes

Message = ProposeRequest | ProposeReply | NoProposal | RoundNotice

# The largest reply whose tokens are looked at one by one.
_FEW_TOKENS = 1024

# What depends on the counts of a round alone: steady decoding repeats it.
_PLANS_KEPT = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    layout: Layout
    bounds: Bounds

    @classmethod
    def of(cls, layout: Layout) -> "_Plan":
        return cls(layout, Bounds.of(layout))

    def read(self, buffer: memoryview) -> list[NDArray[Any]]:
        views = self.layout.views(buffer)
        self.bounds.check(buffer)
        return views


_HEADER_ALONE = _Plan.of(Layout.of([]))


class MessageCodec:
    """Both directions of one pair: it understands what a codec of the same sizes and contract wrote, and nothing else.

    Not bound to a connection; any number of threads may use one.
    """

    def __init__(self, sizes: RoundSizes, contract_digest: str) -> None:
        """`contract_digest` is `KVContract.digest`, in hexadecimal."""
        self.sizes = sizes
        self.max_encoded_bytes = max(max_request_bytes(sizes), max_reply_bytes(sizes))
        self._fingerprint = Fingerprint(bytes.fromhex(contract_digest)[:DIGEST_BYTES], sizes.digest[:DIGEST_BYTES])
        self._request_plan = lru_cache(_PLANS_KEPT)(lambda B, T: _Plan.of(request_layout(sizes, B, T)))
        self._notice_plan = lru_cache(_PLANS_KEPT)(lambda B, T: _Plan.of(notice_layout(sizes, B, T)))
        self._reply_plan = lru_cache(_PLANS_KEPT)(lambda B, K: _Plan.of(reply_layout(sizes, B, K)))

    def encoder(self, buffer: memoryview) -> "Encoder":
        """What writes messages to `buffer`, one over the other."""
        return Encoder(buffer, self._fingerprint, self._parts)

    def awaited_reply(self, request: ProposeRequest, buffer: memoryview) -> "AwaitedReply":
        """The answer to `request` that `buffer` is going to receive."""
        layout = self._reply_plan(request.num_reqs, request.num_speculative_tokens).layout
        header = Header(kind=Kind.PROPOSE_REPLY, epoch=request.epoch, step=request.step)
        reply = reply_from(header, layout.views(buffer[: layout.num_bytes]))
        beginning = bytearray(HEADER_BYTES)
        write_header(memoryview(beginning), reply_header(reply), layout.num_bytes, self._fingerprint)
        return AwaitedReply(
            buffer, layout.num_bytes, bytes(beginning[:DRAFT_TIME_OFFSET]), reply, self.sizes.vocab_size
        )

    def decode(self, buffer: memoryview) -> Message:
        """The message that fills `buffer`; its arrays are views, valid as long as nobody writes to the buffer.

        Raises:
            MessageError: whatever else the bytes are.
        """
        header = read_header(buffer, self._fingerprint)
        try:
            return self._decode_body(header, buffer)
        except MessageError as error:
            error.epoch, error.step = header.epoch, header.step
            raise

    def _decode_body(self, header: Header, buffer: memoryview) -> Message:
        if header.kind is Kind.PROPOSE_REQUEST:
            check_request_header(self.sizes, header)
            plan = self._request_plan(header.num_reqs, header.num_tokens)
            return request_from(self.sizes, header, plan.read(buffer))
        if header.kind is Kind.PROPOSE_REPLY:
            check_reply_header(self.sizes, header)
            plan = self._reply_plan(header.num_reqs, header.num_speculative_tokens)
            return reply_from(header, plan.read(buffer))
        if header.kind is Kind.ROUND_NOTICE:
            check_request_header(self.sizes, header)
            return notice_from(header, self._notice_plan(header.num_reqs, header.num_tokens).read(buffer))
        _HEADER_ALONE.read(buffer)
        return no_proposal_from(header)

    def _parts(self, message: Message) -> tuple[Header, _Plan, list[NDArray[Any]]]:
        """What is written for a message: its header, checked against the sizes, and its arrays in the plan's order."""
        if isinstance(message, ProposeRequest):
            header = request_header(self.sizes, message)
            check_request_header(self.sizes, header)
            return header, self._request_plan(header.num_reqs, header.num_tokens), request_arrays(message)
        if isinstance(message, ProposeReply):
            header = reply_header(message)
            check_reply_header(self.sizes, header)
            return header, self._reply_plan(header.num_reqs, header.num_speculative_tokens), [message.draft_token_ids]
        if isinstance(message, RoundNotice):
            header = notice_header(self.sizes, message)
            check_request_header(self.sizes, header)
            return header, self._notice_plan(header.num_reqs, header.num_tokens), notice_arrays(message)
        return no_proposal_header(message), _HEADER_ALONE, []


class Encoder:
    """Writes messages to one buffer, each tensor straight to its place.

    Between two rounds an engine evicts all that is here from the processor's caches, so the views of the buffer are
    kept: the cheapest code is that which needn't run again.
    """

    def __init__(
        self,
        buffer: memoryview,
        fingerprint: Fingerprint,
        parts: Callable[[Message], tuple[Header, _Plan, list[NDArray[Any]]]],
    ) -> None:
        self._buffer = buffer
        self._fingerprint = fingerprint
        self._parts = parts
        self._views = lru_cache(_PLANS_KEPT)(self._views_for)

    def encode(self, message: Message) -> memoryview:
        """The message's bytes, which lie in the buffer until the next one is encoded.

        Raises:
            MessageError: a tensor's shape or dtype, or a count, isn't what the sizes say, or the buffer is too small.
        """
        header, plan, arrays = self._parts(message)
        encoded, views = self._views(plan)
        plan.layout.write(views, arrays)
        write_header(encoded, header, len(encoded), self._fingerprint)
        return encoded

    def _views_for(self, plan: _Plan) -> tuple[memoryview, list[NDArray[Any]]]:
        num_bytes = plan.layout.num_bytes
        if len(self._buffer) < num_bytes:
            raise MessageError(f"the message has {num_bytes} bytes, the buffer {len(self._buffer)}")
        encoded = self._buffer[:num_bytes]
        return encoded, plan.layout.views(encoded)


class AwaitedReply:
    """All of an answer but its tokens, made while the draft is at work: little is left to do once it has come."""

    def __init__(
        self, buffer: memoryview, num_bytes: int, beginning: bytes, reply: ProposeReply, vocab_size: int
    ) -> None:
        """`num_bytes`: of an answer with tokens; `beginning`: how its header must begin; `reply`: its arrays are
        views of `buffer`."""
        self._buffer = buffer
        self._vocab_size = vocab_size
        self._num_bytes = num_bytes
        self._beginning = beginning
        self._reply = reply
        token_ids = reply.draft_token_ids
        # As unsigned, of which a negative number is a large one. Python's max() is several times faster than numpy's on
        # few numbers, with cold caches.
        self._token_ids = token_ids.reshape(-1).view(np.uint64).data if token_ids.size <= _FEW_TOKENS else None

    def read(self, num_bytes: int) -> ProposeReply | None:
        """The reply, if that is what the `num_bytes` in the buffer are; its arrays are views, valid until the next one
        comes. None: they are something else, or a long reply, and `MessageCodec.decode` knows."""
        if (
            self._token_ids is None
            or num_bytes != self._num_bytes
            or self._buffer[: len(self._beginning)] != self._beginning
            or max(self._token_ids, default=0) >= self._vocab_size
        ):
            return None
        self._reply.draft_time_us = read_draft_time(self._buffer)
        return self._reply

    def has_its_shape(self, reply: ProposeReply) -> bool:
        """Whether another one has as many tokens."""
        return reply.draft_token_ids.shape == self._reply.draft_token_ids.shape
