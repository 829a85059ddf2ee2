"""A gloo process group of two, of our own: beside vLLM's default group, and unknown to it.

The store through which the two find each other listens on one address of this host, not on all as it would by
default. Neither store nor group authenticates anybody: the network between the pools is the boundary of trust.
"""

import re
import secrets
import socket
import time
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from cluster.channel.errors import ChannelUnavailable, DeadlineExceeded

_LOCATION: Final = re.compile(r"(\[?[0-9A-Za-z.:_-]{1,255}\]?):(\d{1,5})/([0-9a-f]{16})", re.ASCII)

_FOR_EVER: Final = timedelta(days=365)
"""gloo's own time-outs close the connection. Ours don't, so gloo gets none."""

_SHORTEST: Final = timedelta(milliseconds=1)

_HEADER_TAG: Final = 0
_PAYLOAD_TAG: Final = 1
_ABORT_TAG: Final = 2


class GlooRendezvous:
    """Where the two meet. The offering side makes it, and has rank 0."""

    def __init__(self, host: str) -> None:
        """Listen on `host` alone, on a free port. Raises ChannelUnavailable where that can't be."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.bind(address)
            listener.listen()
        except OSError as error:
            raise _no_address(host, error) from None
        port = listener.getsockname()[1]
        token = secrets.token_hex(8)
        self.host = host
        self.location = f"{host}:{port}/{token}"
        # The store owns the socket from here on.
        store = dist.TCPStore(host, port, 2, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self._store = dist.PrefixStore(token, store)

    def accept(self, deadline_s: float) -> "GlooGroup":
        return GlooGroup(self._store, 0, self.host, deadline_s)


def join(location: str, host: str, deadline_s: float) -> "GlooGroup":
    """Meet the offering side at `location`, and be reached by it under `host`."""
    match = _LOCATION.fullmatch(location)
    if match is None:
        raise ChannelUnavailable(f"the location {location!r}", "it must be host:port/token", "ask for a new offer")
    store_host, port, token = match.groups()
    try:
        store = dist.TCPStore(
            store_host, int(port), 2, is_master=False, wait_for_workers=False, timeout=_until(deadline_s)
        )
    except (RuntimeError, ValueError) as error:  # torch's DistNetworkError and friends
        raise ChannelUnavailable(
            f"the channel {location}", f"nobody answers there: {_first_line(error)}", "ask for a new offer"
        ) from None
    return GlooGroup(dist.PrefixStore(token, store), 1, host, deadline_s)


class GlooGroup:
    """Sends and receives tensors to and from the other one; blocks, without deadlines. Errors are RuntimeErrors.

    gloo breaks the connection when a wait of it runs out of time, and offers no other way out of one. So waits are for
    ever, in threads that may wait; and `break_connection` runs a wait out of time on purpose.
    """

    def __init__(self, store: dist.Store, rank: int, host: str, deadline_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _until(deadline_s)
        options._devices = [_device(host)]
        self._peer = 1 - rank
        self._store = store  # the group doesn't keep it alive
        try:
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise DeadlineExceeded(f"the peer didn't join the group: {_first_line(error)}") from None

    def send(self, header: torch.Tensor, payload: torch.Tensor | None) -> None:
        works = [self._group.send([header], self._peer, _HEADER_TAG)]
        if payload is not None:
            works.append(self._group.send([payload], self._peer, _PAYLOAD_TAG))
        for work in works:
            work.wait(_FOR_EVER)

    def receive_header(self, header: torch.Tensor) -> None:
        self._group.recv([header], self._peer, _HEADER_TAG).wait(_FOR_EVER)

    def receive_payload(self, payload: torch.Tensor) -> None:
        self._group.recv([payload], self._peer, _PAYLOAD_TAG).wait(_FOR_EVER)

    def break_connection(self) -> None:
        """All waits of this group end with an error, here and at the peer. From any thread; takes some milliseconds."""
        never_sent = torch.empty(1, dtype=torch.uint8)
        try:
            self._group.recv([never_sent], self._peer, _ABORT_TAG).wait(_SHORTEST)
        except RuntimeError:
            return  # as meant, or it was broken already


def _device(host: str) -> object:
    try:
        return dist.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise _no_address(host, error) from None


def _no_address(host: str, error: Exception) -> ChannelUnavailable:
    what = f"the address {host!r} of this host"
    return ChannelUnavailable(what, f"nothing can listen on it: {_first_line(error)}", "name one that this host has")


def _until(deadline_s: float) -> timedelta:
    remaining = deadline_s - time.monotonic()
    return min(max(timedelta(seconds=min(remaining, _FOR_EVER.total_seconds())), _SHORTEST), _FOR_EVER)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
