"""`python -m cluster.bench.gpu_link`: what carries a round between two GPUs of this host, by its size, without a model.

A round's two ends as in a pair, alone: the target lets the request have so many bytes, the draft copies them to where
it reads them, and replies with a few. Its time is the target's stream's, from one round to the next.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Annotated, Final, cast

import torch
import typer
from rich.table import Table

from cluster.bench.environment import environment
from cluster.channel import ChannelAddress, ChannelKind, offer_channel, open_channel
from cluster.channel.device import DeviceChannel
from cluster.commands.terminal import DebugOption, JsonOption, command, messages, output
from cluster.errors import UserError
from cluster.speculation.device_kernels import Copier, Copy

SIZES: Final = tuple(1 << power for power in range(6, 27, 2))
"""64 B to 64 MiB; the states of 8,192 tokens of Qwen3-8B are the last."""

REPLY_BYTES: Final = 256
_WARM_UP_ROUNDS: Final = 10
_MOST_ROUNDS: Final = 100
_BYTES_A_REPEAT: Final = 1 << 31
"""A size's rounds move this much at most."""

_START_TIMEOUT_S: Final = 180.0
_KINDS: Final[tuple[ChannelKind, ...]] = ("cuda_ipc", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigure:
    """Medians over repeats, with the least and the greatest. `way` "copy" is torch's copy from GPU to GPU, without a
    round about it: what the link gives."""

    way: str
    num_bytes: int
    microseconds: float
    least: float
    greatest: float

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.microseconds / 1e3


def rounds_of(num_bytes: int) -> int:
    return max(_WARM_UP_ROUNDS, min(_MOST_ROUNDS, _BYTES_A_REPEAT // num_bytes))


def serve(address: str, repeats: int, connection: Connection) -> None:
    """The draft's process. It knows what comes, so nothing is said beside."""
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    channel = cast(DeviceChannel, open_channel(ChannelAddress.from_json(address), time.monotonic() + _START_TIMEOUT_S))
    with channel:
        landing = torch.empty(max(SIZES), dtype=torch.uint8, device=device)
        copier = Copier(device, max_copies=1, num_tables=_WARM_UP_ROUNDS + _MOST_ROUNDS + 1)
        step = 0
        for num_bytes in SIZES:
            for _ in range(repeats):
                for _ in range(_WARM_UP_ROUNDS + rounds_of(num_bytes)):
                    step += 1
                    channel.await_request(step, num_bytes)
                    copier.copy([Copy(landing.data_ptr(), channel.request_address, num_bytes)])
                    channel.reply(step, REPLY_BYTES)
                torch.cuda.synchronize()
        connection.recv_bytes()  # the target's last round has passed


def measure(kind: ChannelKind, repeats: int) -> list[LinkFigure]:
    """Of the rounds of each size. Raises UserError where the channel can't be had."""
    torch.cuda.set_device(0)
    offer = offer_channel(kind, max_send_bytes=max(SIZES), max_receive_bytes=REPLY_BYTES, max_notice_bytes=1)
    context = get_context("spawn")
    connection, theirs = context.Pipe()
    draft = context.Process(target=serve, args=(offer.address.to_json(), repeats, theirs), daemon=True)
    draft.start()
    channel = cast(DeviceChannel, offer.accept(time.monotonic() + _START_TIMEOUT_S))
    steps = itertools.count(1)

    def put(num_bytes: int) -> None:
        step = next(steps)
        channel.request(step, num_bytes, REPLY_BYTES)
        channel.await_reply(step)

    def await_end(ended: torch.cuda.Event) -> None:
        while not ended.query():
            if channel.gone() is not None:  # the stream waits for it
                channel.release(next(steps))
                raise UserError("the draft's process", "it has ended", "look at what it wrote last")
            time.sleep(1e-3)

    figures = [_timed(kind, num_bytes, repeats, partial(put, num_bytes), await_end) for num_bytes in SIZES]
    connection.send_bytes(b"done")
    draft.join(_START_TIMEOUT_S)
    channel.close()
    return figures


def measure_copies(repeats: int) -> list[LinkFigure]:
    """From GPU 0 to GPU 1, one after the other on a stream."""
    figures = []
    for num_bytes in SIZES:
        source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
        to = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
        put = partial(to.copy_, source, non_blocking=True)
        figures.append(_timed("copy", num_bytes, repeats, put, torch.cuda.Event.synchronize))
    return figures


def _timed(
    way: str,
    num_bytes: int,
    repeats: int,
    put: Callable[[], object],
    await_end: Callable[[torch.cuda.Event], None],
) -> LinkFigure:
    """What `put` puts on the stream, many times over, after a warm-up."""
    times = []
    for _ in range(repeats):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for number in range(_WARM_UP_ROUNDS + rounds_of(num_bytes)):
            if number == _WARM_UP_ROUNDS:
                begun.record()
            put()
        ended.record()
        await_end(ended)
        times.append(1e3 * begun.elapsed_time(ended) / rounds_of(num_bytes))
    return LinkFigure(
        way=way, num_bytes=num_bytes, microseconds=statistics.median(times), least=min(times), greatest=max(times)
    )


@command
def main(
    repeats: Annotated[int, typer.Option(min=3, help="Of each size.")] = 3,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Rounds of 64 B to 64 MiB between two GPUs: by CUDA IPC, by NCCL, and beside them a copy alone."""
    if torch.cuda.device_count() < 2:
        raise UserError("this machine", f"it has {torch.cuda.device_count()} GPUs", "run it where there are two")
    figures = measure_copies(repeats)
    for kind in _KINDS:
        with messages.status(f"rounds over {kind}"):
            figures += measure(kind, repeats)
    if json_output:
        plain = [asdict(figure) | {"gb_per_second": figure.gb_per_second} for figure in figures]
        print(json.dumps({"environment": environment(), "figures": plain}))
        return
    ways = ("copy", *_KINDS)
    table = Table("bytes", *ways, caption="µs of a round, or of a copy: median (least–greatest), and GB/s")
    for num_bytes in SIZES:
        row = {figure.way: figure for figure in figures if figure.num_bytes == num_bytes}
        table.add_row(f"{num_bytes:,}", *(_shown(row[way]) for way in ways))
    output().print(table)


def _shown(figure: LinkFigure) -> str:
    times = f"{figure.microseconds:.1f} ({figure.least:.1f}–{figure.greatest:.1f})"
    return f"{times}, {figure.gb_per_second:.1f}"


if __name__ == "__main__":
    typer.run(main)
