"""A channel by its kind. What a kind needs is imported when it is used: shm does without torch."""

from cluster.channel.base import LOOPBACK, Channel, ChannelAddress, ChannelKind, ChannelOffer

# Two: one message is on its way at a time, and a late one must not hold up the next.
DEFAULT_NUM_SLOTS = 2


def offer_channel(
    kind: ChannelKind,
    *,
    max_send_bytes: int,
    max_receive_bytes: int,
    max_notice_bytes: int = 0,
    num_slots: int = DEFAULT_NUM_SLOTS,
    host: str = LOOPBACK,
) -> ChannelOffer:
    """Offer a channel; its `address` goes to the peer, which opens it.

    `host` is the address of this host that the peer reaches it under, and for gloo the only one that is listened on.
    `max_notice_bytes` is for cuda_ipc and nccl, whose messages are notices beside what goes through device memory.

    Raises:
        ChannelUnavailable: this kind can't be had here; says why and what else there is.
    """
    sizes = {"max_send_bytes": max_send_bytes, "max_receive_bytes": max_receive_bytes, "num_slots": num_slots}
    if kind == "shm":
        from cluster.channel.shm import ShmOffer

        return ShmOffer(**sizes)
    if kind == "cuda_ipc":
        from cluster.channel.cuda_ipc import CudaIpcOffer

        return CudaIpcOffer(**sizes, max_notice_bytes=max_notice_bytes)
    if kind == "nccl":
        from cluster.channel.nccl import NcclOffer

        return NcclOffer(**sizes, max_notice_bytes=max_notice_bytes, host=host)
    from cluster.channel.collective import GlooOffer

    return GlooOffer(**sizes, host=host)


def check_channel(address: ChannelAddress) -> None:
    """Before the peer is told that this side opens what it offers.

    Raises:
        ChannelUnavailable: this process can't, whatever the peer does. A peer that has ended is no reason.
    """
    if address.kind == "shm":
        from cluster.channel.shm import ShmChannel

        ShmChannel.check(address)
    elif address.kind == "cuda_ipc":
        from cluster.channel.cuda_ipc import CudaIpcChannel

        CudaIpcChannel.check(address)
    elif address.kind == "nccl":
        from cluster.channel.nccl import NcclChannel

        NcclChannel.check(address)


def open_channel(address: ChannelAddress, deadline_s: float, *, host: str = LOOPBACK) -> Channel:
    """Open what the peer offered. `host` is this host's own address, as the peer reaches it.

    Raises:
        ChannelUnavailable: there is nothing at this address, or not what it says.
        DeadlineExceeded: the peer didn't answer in time.
    """
    if address.kind == "shm":
        from cluster.channel.shm import ShmChannel

        return ShmChannel.open(address)
    if address.kind == "cuda_ipc":
        from cluster.channel.cuda_ipc import CudaIpcChannel

        return CudaIpcChannel.open(address)
    if address.kind == "nccl":
        from cluster.channel.nccl import NcclChannel

        return NcclChannel.open(address, deadline_s, host=host)
    from cluster.channel.collective import GlooChannel

    return GlooChannel.open(address, deadline_s, host=host)
