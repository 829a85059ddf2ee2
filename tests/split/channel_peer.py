"""The other process of the channel tests: `python -m tests.split.channel_peer`.

It reads one JSON object a line, each with a role to play and the address of a channel, and prints one a line: that it
is ready, what the role reports, and that it is done. It ends with its input.
"""

import json
import math
import os
import resource
import signal
import sys
import time

from cluster.channel import ChannelAddress, ChannelError, offer_channel, open_channel

BUFFER_BYTES = 1 << 20


def echo(address: ChannelAddress) -> None:
    """Send every message back, until the channel ends."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open_channel(address, time.monotonic() + 60) as channel:
        report(ready=True)
        try:
            while True:
                num_bytes = channel.recv(buffer, math.inf)
                channel.send([buffer[:num_bytes]], time.monotonic() + 60)
        except ChannelError as error:
            report(error=type(error).__name__, torch="torch" in sys.modules)


def idle(address: ChannelAddress) -> None:
    """Wait for one message, and report the CPU time that the wait took."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open_channel(address, time.monotonic() + 60) as channel:
        report(ready=True)
        before, started = cpu_s(), time.monotonic()
        channel.recv(buffer, math.inf)
        report(cpu_s=cpu_s() - before, waited_s=time.monotonic() - started)


def still(address: ChannelAddress) -> None:
    """Open the channel and do nothing until killed."""
    with open_channel(address, time.monotonic() + 60):
        report(ready=True)
        signal.pause()


def leave(address: ChannelAddress) -> None:
    """Send three messages, close, and end."""
    with open_channel(address, time.monotonic() + 60) as channel:
        report(ready=True)
        for number in range(3):
            channel.send([memoryview(bytes([number]))], time.monotonic() + 60)


def offer(_: ChannelAddress | None) -> None:
    """Offer a shm channel, accept whoever opens it, and do nothing until killed."""
    offer = offer_channel("shm", max_send_bytes=64, max_receive_bytes=64)
    report(address=offer.address.to_json())
    with offer.accept(time.monotonic() + 60):
        report(ready=True)
        signal.pause()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def report(**values: object) -> None:
    os.write(1, (json.dumps(values) + "\n").encode())


ROLES = {"echo": echo, "idle": idle, "still": still, "leave": leave, "offer": offer}

if __name__ == "__main__":
    for line in sys.stdin:
        order = json.loads(line)
        ROLES[order["role"]](None if order["address"] is None else ChannelAddress.from_json(order["address"]))
        report(done=True)
