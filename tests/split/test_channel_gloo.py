"""gloo: our group lives beside vLLM's default group, and keeps to the address that it was given."""

import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster.channel import ChannelClosed, ChannelUnavailable, DeadlineExceeded, offer_channel, open_channel
from cluster.channel.slots import SlotQueue
from tests.split.test_channel import offered, pair_of, within


def test_the_channel_is_unknown_to_the_default_group(tmp_path: Path) -> None:
    # An engine of another test may have made the default group, and still need it.
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pair_of("gloo", max_send_bytes=8, max_receive_bytes=8) as (one, other):
            one.send([memoryview(b"12345678")], within())
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1, 1, 1]
            buffer = memoryview(bytearray(8))
            assert other.recv(buffer, within()) == 8
            assert buffer == b"12345678"
        dist.all_reduce(tensor)
    finally:
        if ours:
            dist.destroy_process_group()


def test_the_rendezvous_listens_on_the_given_address_only() -> None:
    offer = offered("gloo")
    port = int(offer.address.location.rpartition("/")[0].rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port)).close()
    offer.withdraw()


def test_an_address_that_this_host_does_not_have_is_refused() -> None:
    with pytest.raises(ChannelUnavailable, match="nothing can listen on it"):
        offer_channel("gloo", max_send_bytes=1, max_receive_bytes=1, host="192.0.2.1")


def test_two_channels_with_tokens_apart_do_not_meet() -> None:
    offer = offered("gloo")
    place, _, token = offer.address.location.rpartition("/")
    other = type(offer.address).from_json(offer.address.to_json().replace(token, "0" * 16))
    assert other.location == f"{place}/{'0' * 16}"
    errors = []

    def open_other() -> None:
        try:
            open_channel(other, within(1))
        except DeadlineExceeded as error:
            errors.append(error)

    opener = threading.Thread(target=open_other)
    opener.start()
    with pytest.raises(DeadlineExceeded):
        offer.accept(within(1))
    opener.join()
    assert len(errors) == 1


def test_a_queue_that_failed_gives_out_what_it_has_first() -> None:
    queue = SlotQueue(2)
    queue.filled(7)
    queue.fail(ChannelClosed("over"))
    assert queue.wait_filled(within(), "") == 7
    queue.emptied()
    with pytest.raises(ChannelClosed, match="over"):
        queue.wait_filled(within(), "")
    with pytest.raises(ChannelClosed, match="over"):
        queue.wait_free(within(), "")
