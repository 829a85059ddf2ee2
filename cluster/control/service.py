"""gRPC round the state machine: one stream a member, and a clock."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from dspark.v1.control_pb2 import JoinRequest, JoinResponse
from dspark.v1.control_pb2_grpc import ControlServiceServicer, add_ControlServiceServicer_to_server

from cluster.control.options import SERVER_OPTIONS
from cluster.control.settings import CoordinatorSettings
from cluster.control.state import NEW, Coordinator, Output, Record
from cluster.errors import UserError

STOP_GRACE_S: Final = 1.0
"""For streams that were ended to be closed. It takes milliseconds."""


class ControlService(ControlServiceServicer):
    """Runs in one event loop, so that the state machine sees one event after the other."""

    def __init__(self, coordinator: Coordinator, keep: Callable[[Record], None]) -> None:
        """`keep` is given the coordinator's record whenever that has changed, before anyone is told why."""
        self.coordinator = coordinator
        self._keep = keep
        self._kept = coordinator.record
        self._streams = itertools.count()
        self._outboxes: dict[int, asyncio.Queue[JoinResponse | None]] = {}
        """By stream; None ends it."""

    async def Join(self, request_iterator: AsyncIterator[JoinRequest], context: Any) -> AsyncIterator[JoinResponse]:  # noqa: N802, ARG002
        stream, outbox = next(self._streams), asyncio.Queue[JoinResponse | None]()
        self._outboxes[stream] = outbox
        reader = asyncio.create_task(self._read(stream, outbox, request_iterator))
        try:
            while (response := await outbox.get()) is not None:
                yield response
            if reader.done():
                await reader  # raises what went wrong in it
        finally:  # also when the member's connection has ended
            reader.cancel()
            del self._outboxes[stream]
            self._deliver(self.coordinator.broken(stream))

    async def _read(
        self, stream: int, outbox: asyncio.Queue[JoinResponse | None], requests: AsyncIterator[JoinRequest]
    ) -> None:
        try:
            async for request in requests:
                self._deliver(self.coordinator.receive(stream, request, time.monotonic()))
        finally:
            outbox.put_nowait(None)

    async def watch_heartbeats(self, interval_s: float) -> None:
        """Lose silent members, until this is cancelled."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            # Whoever was held up itself has heard nobody, and judges nobody by that.
            if now - begun < 2 * interval_s:
                self._deliver(self.coordinator.expire(now))

    def end_streams(self) -> None:
        """Let every member go; it finds its coordinator gone."""
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        if self.coordinator.record != self._kept:
            self._kept = self.coordinator.record
            self._keep(self._kept)
        for output in outputs:
            outbox = self._outboxes.get(output.stream)
            if outbox is not None:
                outbox.put_nowait(output.response)
                if output.is_last:
                    outbox.put_nowait(None)


@asynccontextmanager
async def serving(
    settings: CoordinatorSettings,
    *,
    record: Record = NEW,
    keep: Callable[[Record], None] = lambda _: None,
) -> AsyncIterator[Coordinator]:
    """Serve a coordinator while the block runs: one that goes on from `record`, or a new one.

    Raises:
        UserError: nobody can listen at the address.
    """
    service = ControlService(Coordinator(settings, record), keep)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_ControlServiceServicer_to_server(service, server)
    try:
        server.add_insecure_port(settings.address)
    except RuntimeError as error:
        raise UserError(
            f"the coordinator's address {settings.address}", f"it can't be listened on ({error})", "choose another one"
        ) from error
    await server.start()
    watching = asyncio.create_task(service.watch_heartbeats(settings.heartbeat_interval_ms / 1e3))
    try:
        yield service.coordinator
    finally:
        watching.cancel()
        service.end_streams()
        await server.stop(STOP_GRACE_S)
