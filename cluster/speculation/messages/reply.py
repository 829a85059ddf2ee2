"""What the draft answers to a round: its tokens, or why there are none."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.speculation.messages.errors import MessageError, NoProposalReason
from cluster.speculation.messages.header import Header, Kind
from cluster.speculation.messages.layout import I64, Layout, Section, Tensor
from cluster.speculation.messages.sizes import RoundSizes


@dataclass(slots=True, kw_only=True, eq=False)
class ProposeReply:
    """The drafted tokens of a round, for as many as its request wanted."""

    epoch: int
    step: int
    draft_token_ids: NDArray[np.int64]
    """[B, K of the request], each below V."""
    draft_time_us: int = 0
    """From the decoded request to the finished tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoProposal:
    """The draft has nothing for this round; the target goes on without."""

    epoch: int
    step: int
    reason: NoProposalReason


def reply_layout(sizes: RoundSizes, num_reqs: int, num_speculative_tokens: int) -> Layout:
    return Layout.of([Tensor("draft_token_ids", I64, (num_reqs, num_speculative_tokens), below=sizes.vocab_size)])


def reply_section(sizes: RoundSizes, num_reqs: int) -> Section:
    """Where the tokens of a reply lie in device memory, as many for each request as there can be."""
    return reply_layout(sizes, num_reqs, sizes.num_speculative_tokens).sections[0]


def max_reply_bytes(sizes: RoundSizes) -> int:
    """Of a `ProposeReply`; a `NoProposal` is only a header."""
    return reply_layout(sizes, sizes.max_num_reqs, sizes.num_speculative_tokens).num_bytes


def reply_header(reply: ProposeReply) -> Header:
    if reply.draft_token_ids.ndim != 2:
        raise MessageError(f"draft_token_ids has {reply.draft_token_ids.ndim} dimensions, it must have 2")
    num_reqs, num_speculative_tokens = reply.draft_token_ids.shape
    return Header(
        kind=Kind.PROPOSE_REPLY,
        epoch=reply.epoch,
        step=reply.step,
        num_reqs=num_reqs,
        num_speculative_tokens=num_speculative_tokens,
        draft_time_us=reply.draft_time_us,
    )


def check_reply_header(sizes: RoundSizes, header: Header) -> None:
    """What makes the layout's size bounded. The layout may be computed after this, not before."""
    if not 1 <= header.num_reqs <= sizes.max_num_reqs:
        raise MessageError(f"the reply has {header.num_reqs} requests, it can have 1 to {sizes.max_num_reqs}")
    if header.num_speculative_tokens > sizes.num_speculative_tokens:
        found, limit = header.num_speculative_tokens, sizes.num_speculative_tokens
        raise MessageError(f"the reply has {found} tokens a request, the pair was set up for {limit}")
    if header.flags:
        raise MessageError(f"the reply has flags {header.flags:#x}, and there are none")


def reply_from(header: Header, arrays: list[NDArray[Any]]) -> ProposeReply:
    return ProposeReply(
        epoch=header.epoch,
        step=header.step,
        draft_token_ids=arrays[0],
        draft_time_us=header.draft_time_us,
    )


def no_proposal_header(refusal: NoProposal) -> Header:
    return Header(kind=Kind.NO_PROPOSAL, epoch=refusal.epoch, step=refusal.step, flags=refusal.reason)


def no_proposal_from(header: Header) -> NoProposal:
    try:
        reason = NoProposalReason(header.flags)
    except ValueError:
        raise MessageError(f"no refusal has reason {header.flags}") from None
    return NoProposal(epoch=header.epoch, step=header.step, reason=reason)
