"""The 128 bytes that every message starts with."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cluster.speculation.messages.errors import MessageError, NoProposalReason

MAGIC: Final = b"DSPK"
VERSION: Final = 1
HEADER_BYTES: Final = 128
DIGEST_BYTES: Final = 16
"""Of each digest in the header: enough, for they tell mistakes apart, not attacks."""

# offset 0  magic 4s, version u16, kind u16
#        8  num_bytes u64 (of the whole message), epoch u64, step u64
#       32  first 16 bytes of the contract's SHA-256, then of the sizes'
#       64  num_reqs u32, num_tokens u32, num_speculative_tokens u32, flags u32 (or the reason of a NoProposal)
#       80  draft_time_us u64
#       88  40 bytes of zeros
_HEADER: Final = struct.Struct("<4sHHQQQ16s16sIIIIQ40x")
_DRAFT_TIME: Final = struct.Struct("<Q")
DRAFT_TIME_OFFSET: Final = 80
"""All before it is known of a reply before it comes."""


class Kind(IntEnum):
    PROPOSE_REQUEST = 1
    PROPOSE_REPLY = 2
    NO_PROPOSAL = 3
    ROUND_NOTICE = 4


_KINDS: Final = {kind.value: kind for kind in Kind}


# Not frozen, as the messages aren't: that would cost a call for each field, and a round has four of these.
@dataclass(slots=True, kw_only=True)
class Header:
    kind: Kind
    epoch: int
    step: int
    num_reqs: int = 0
    num_tokens: int = 0
    num_speculative_tokens: int = 0
    flags: int = 0
    draft_time_us: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What both sides must have in common before the rest of a message means anything to them."""

    contract: bytes
    sizes: bytes


def write_header(buffer: memoryview, header: Header, num_bytes: int, fingerprint: Fingerprint) -> None:
    try:
        _HEADER.pack_into(
            buffer,
            0,
            MAGIC,
            VERSION,
            header.kind,
            num_bytes,
            header.epoch,
            header.step,
            fingerprint.contract,
            fingerprint.sizes,
            header.num_reqs,
            header.num_tokens,
            header.num_speculative_tokens,
            header.flags,
            header.draft_time_us,
        )
    except struct.error as error:
        raise MessageError(f"the header {header} has a number that its field can't hold: {error}") from None


def read_header(buffer: memoryview, fingerprint: Fingerprint) -> Header:
    """Read and check what is the same for all kinds; the counts are the kinds' own to check.

    Raises:
        MessageError: these bytes weren't written by a peer of this version, contract and sizes, or aren't all there.
    """
    if len(buffer) < HEADER_BYTES:
        raise MessageError(f"{len(buffer)} bytes are no message: the header alone has {HEADER_BYTES}")
    magic, version, kind, num_bytes, epoch, step, contract, sizes, *counts = _HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise MessageError(f"a message begins with {MAGIC!r}, this one with {magic!r}")
    if version != VERSION:
        raise MessageError(f"the message has version {version}, this side speaks {VERSION}")
    if kind not in _KINDS:
        raise MessageError(f"no message has kind {kind}")
    if contract != fingerprint.contract:
        what = f"the message is of contract {contract.hex()}, this side holds {fingerprint.contract.hex()}"
        raise MessageError(what, NoProposalReason.WRONG_DIGEST, epoch=epoch, step=step)
    if sizes != fingerprint.sizes:
        what = f"the message is of round sizes {sizes.hex()}, this side holds {fingerprint.sizes.hex()}"
        raise MessageError(what, NoProposalReason.WRONG_DIGEST, epoch=epoch, step=step)
    if num_bytes != len(buffer):
        raise MessageError(f"the message has {num_bytes} bytes, {len(buffer)} arrived")
    num_reqs, num_tokens, num_speculative_tokens, flags, draft_time_us = counts
    return Header(
        kind=_KINDS[kind],
        epoch=epoch,
        step=step,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_speculative_tokens=num_speculative_tokens,
        flags=flags,
        draft_time_us=draft_time_us,
    )


def read_draft_time(buffer: memoryview) -> int:
    """`draft_time_us` of a header that has been found to be right."""
    (draft_time_us,) = _DRAFT_TIME.unpack_from(buffer, DRAFT_TIME_OFFSET)
    return int(draft_time_us)
