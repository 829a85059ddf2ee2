"""What is wrong with a message, and what a draft answers when it has nothing to propose."""

from enum import IntEnum


class NoProposalReason(IntEnum):
    """Why a draft proposes nothing for a round. The numbers are on the wire: add, never renumber."""

    STALE_EPOCH = 1
    WRONG_DIGEST = 2
    DECODE_ERROR = 3


class MessageError(ValueError):
    """Bytes that are no message of this pair, or a message that this pair's sizes have no room for.

    `reason`, `epoch` and `step` are what a draft answers to such a request; epoch and step are 0 where the header
    itself can't be read.
    """

    def __init__(
        self,
        what: str,
        reason: NoProposalReason = NoProposalReason.DECODE_ERROR,
        *,
        epoch: int = 0,
        step: int = 0,
    ) -> None:
        super().__init__(what)
        self.reason = reason
        self.epoch = epoch
        self.step = step
