"""Which failures of a call pass by themselves, and how long to wait for that."""

from typing import Final

import grpc

from cluster.client import GenerationError

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
"""A server that comes back is found within this time."""


def retry_wait_s(error: GenerationError, attempt: int) -> float | None:
    """Seconds before attempt `attempt` (from 1, the first repetition), or None where a repetition would fail too.

    The server's hint counts where it gives one. RESOURCE_EXHAUSTED without one is a message that is too large.
    """
    if error.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after_s
    if error.status is grpc.StatusCode.UNAVAILABLE:
        backed_off = _FIRST_WAIT_S * 2.0 ** min(attempt - 1, 16)
        return error.retry_after_s if error.retry_after_s is not None else min(backed_off, _LONGEST_WAIT_S)
    return None
