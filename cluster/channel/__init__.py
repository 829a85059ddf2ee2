"""How the bytes of a round get from one process to the other.

A `Channel` carries whole messages in both directions between two processes, and nothing else: what a message says is
`cluster.speculation.messages`' business. One side makes an offer and sends its address over the control connection;
the other opens it. `shm` connects two processes of one host, `gloo` any two, `cuda_ipc` the GPUs of one host, `nccl`
any two GPUs.
"""

from cluster.channel.base import Channel, ChannelAddress, ChannelKind, ChannelOffer
from cluster.channel.errors import (
    ChannelClosed,
    ChannelCorrupted,
    ChannelError,
    ChannelUnavailable,
    DeadlineExceeded,
    PeerDied,
)
from cluster.channel.factory import check_channel, offer_channel, open_channel

__all__ = [
    "Channel",
    "ChannelAddress",
    "ChannelClosed",
    "ChannelCorrupted",
    "ChannelError",
    "ChannelKind",
    "ChannelOffer",
    "ChannelUnavailable",
    "DeadlineExceeded",
    "PeerDied",
    "check_channel",
    "offer_channel",
    "open_channel",
]
