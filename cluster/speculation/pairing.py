"""From a contract that both sides hold to a channel that carries rounds: what each side does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Final

from dspark.v1 import control_pb2

from cluster.channel import (
    Channel,
    ChannelAddress,
    ChannelError,
    ChannelUnavailable,
    check_channel,
    offer_channel,
    open_channel,
)
from cluster.channel.base import LOOPBACK
from cluster.contract.codec import from_plain, to_plain
from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError
from cluster.control.member import Member
from cluster.control.refusals import ControlError
from cluster.speculation.handshake import round_sizes, tables
from cluster.speculation.messages import MessageCodec, max_notice_bytes, max_reply_bytes, max_request_bytes
from cluster.speculation.settings import RemoteDraftSettings

OPEN_TIMEOUT_S: Final = 30.0
"""For a process that has said that it opens the channel to do it."""


def offer_rounds(
    settings: RemoteDraftSettings, member: Member, contract: KVContract, options: control_pb2.RoundOptions
) -> tuple[Channel, MessageCodec]:
    """The target's side.

    Raises:
        ContractError, ControlError: the draft doesn't open the channel.
    """
    sizes = round_sizes(contract, options)
    offer = offer_channel(
        settings.channel,
        max_send_bytes=max_request_bytes(sizes),
        max_receive_bytes=max_reply_bytes(sizes),
        max_notice_bytes=max_notice_bytes(sizes),
        host=settings.host,
    )
    try:
        member.offer_channel(control_pb2.ChannelAddress(**to_plain(offer.address)), options)
        return offer.accept(time.monotonic() + OPEN_TIMEOUT_S), MessageCodec(sizes, contract.digest)
    except ChannelError as error:
        raise _not_open(offer.address, error) from error
    finally:
        offer.withdraw()


def open_rounds(
    member: Member,
    contract: KVContract,
    table_widths: Sequence[int],
    *,
    take_kv: Callable[[control_pb2.SharedKV], None] | None = None,
    host: str = LOOPBACK,
) -> tuple[Channel, MessageCodec]:
    """The draft's side. `table_widths` are those of its own block tables, one for each table that travels; `take_kv`
    takes the target's KV, where the contract shares it, before the channel is accepted; `host` is this host's address,
    as the target's reaches it.

    Raises:
        ContractError, ChannelUnavailable: the target offers a channel that doesn't fit.
        ControlError: it offers none, or has gone since.
    """
    offer = member.await_channel()
    offered = tuple(offer.round_options.block_table_widths)
    if offered != tuple(table_widths):
        raise ContractError(
            "block_table_widths",
            target=str(offered),
            draft=str(tuple(table_widths)),
            reason=f"rows of the target's block tables {', '.join(tables(contract))} are copied into the draft's",
            remedy="give both sides the same max_model_len and block size",
        )
    codec = MessageCodec(round_sizes(contract, offer.round_options), contract.digest)
    names = [field.name for field in fields(ChannelAddress)]
    address = from_plain(ChannelAddress, {name: getattr(offer.address, name) for name in names})
    check_channel(address)
    if contract.kv_sharing is not None:
        assert take_kv is not None
        take_kv(offer.round_options.shared_kv)
    member.accept_channel()
    try:
        return open_channel(address, time.monotonic() + OPEN_TIMEOUT_S, host=host), codec
    except (ChannelError, ChannelUnavailable) as error:  # checked above: it is the offer that is gone, with its target
        raise _not_open(address, error) from error


def _not_open(address: ChannelAddress, error: Exception) -> ControlError:
    return ControlError(
        f"the {address.kind} channel between target and draft",
        f"it didn't open ({error})",
        "look at what the processes wrote last, and start again",
    )
