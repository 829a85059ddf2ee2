"""Every message between a target and its draft: a fixed little-endian header, then tensors' raw bytes. No pickle.

A round is one `ProposeRequest` from the target and one answer from the draft, `ProposeReply` or `NoProposal`; where
its tensors travel through device memory, it is a `RoundNotice`, and the answer is there too. Both sides hold the same
`RoundSizes` and the same contract; `MessageCodec` turns messages into bytes and back, in place: what it decodes are
numpy views of the received buffer, which `torch.from_numpy` takes over without a copy. No module here imports torch.

Shapes: T scheduled tokens with the rejected ones, B requests of the round (`num_reqs`), R slots (`max_num_reqs`),
K drafted tokens, H hidden size, V vocabulary, L prefill lookahead, W width of a block table.
"""

from cluster.speculation.messages.codec import AwaitedReply, Message, MessageCodec
from cluster.speculation.messages.errors import MessageError, NoProposalReason
from cluster.speculation.messages.layout import Layout
from cluster.speculation.messages.notice import DeviceLayout, RoundNotice, max_notice_bytes
from cluster.speculation.messages.reply import NoProposal, ProposeReply, max_reply_bytes
from cluster.speculation.messages.request import ProposeRequest, max_request_bytes
from cluster.speculation.messages.sizes import BlockTableSizes, FloatDtype, RoundSizes

__all__ = [
    "AwaitedReply",
    "BlockTableSizes",
    "DeviceLayout",
    "FloatDtype",
    "Layout",
    "Message",
    "MessageCodec",
    "MessageError",
    "NoProposal",
    "NoProposalReason",
    "ProposeReply",
    "ProposeRequest",
    "RoundNotice",
    "RoundSizes",
    "max_notice_bytes",
    "max_reply_bytes",
    "max_request_bytes",
]
