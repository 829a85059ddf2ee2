"""Messages to bytes and back, both in place."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from cluster.speculation.messages.bounds import Bounds
from cluster.speculation.messages.errors import MessageError
from cluster.speculation.messages.header import (
    DIGEST_BYTES,
    Fingerprint,
    Header,
    Kind,
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
    reply_arrays,
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

# What depends on the counts of a round alone: steady decoding repeats it.
_PLANS_KEPT = 256

_HEADER_ALONE = Layout.of([])


@dataclass(frozen=True, slots=True)
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

    def encode_into(self, message: Message, buffer: memoryview) -> int:
        """Write the message to the start of `buffer`, each tensor straight to its place; returns the bytes written.

        Raises:
            MessageError: a tensor's shape or dtype, or a count, isn't what the sizes say, or the buffer is too small.
        """
        if isinstance(message, ProposeRequest):
            header = request_header(self.sizes, message)
            check_request_header(self.sizes, header)
            layout = self._request_plan(header.num_reqs, header.num_tokens).layout
            arrays = request_arrays(message)
        elif isinstance(message, ProposeReply):
            header = reply_header(self.sizes, message)
            check_reply_header(self.sizes, header)
            layout = self._reply_plan(header.num_reqs, header.num_speculative_tokens).layout
            arrays = reply_arrays(message)
        elif isinstance(message, RoundNotice):
            header = notice_header(self.sizes, message)
            check_request_header(self.sizes, header)
            layout = self._notice_plan(header.num_reqs, header.num_tokens).layout
            arrays = notice_arrays(message)
        else:
            header, layout, arrays = no_proposal_header(message), _HEADER_ALONE, []
        layout.write(buffer, arrays)
        write_header(buffer, header, layout.num_bytes, self._fingerprint)
        return layout.num_bytes

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
        _HEADER_ALONE.views(buffer)
        return no_proposal_from(header)
