"""A replica's end of its gateways' streams: runs their generations, and sends what all of them gained in one message.

A gateway that is slow gets fewer and larger messages: what waits for it is one delta a generation.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
from dspark.v1 import replica_pb2 as pb
from dspark.v1 import replica_pb2_grpc as pb_grpc

from cluster.control.options import SERVER_KEEPALIVE
from cluster.serving import wire
from cluster.serving.auth import BearerToken
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.errors import RequestError
from cluster.serving.server import host_port
from cluster.serving.types import Request, TokenPrompt
from cluster.serving.waiting import WaitingDeltas

Generate = Callable[[str, Request, tuple[int, ...], int], AsyncGenerator[EngineDelta, None]]
"""`GenerationEngine.generate`."""

STREAM_OPTIONS: Final = (
    # The gateway has checked each request, and a message may have the prompt's log probabilities of many.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # What a gateway hasn't read yet waits in the replica, where it becomes one delta, and not in buffers that grow.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16 << 10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """HOST:PORT, and the secret without which nobody is let in there."""

    address: str
    token: str = field(repr=False)


class ReplicaServer:
    """Listens from `start` to `stop`."""

    def __init__(self, generate: Generate) -> None:
        self._token = secrets.token_hex(32)
        self._server = grpc.aio.server(
            interceptors=[BearerToken(self._token)],
            options=(*SERVER_KEEPALIVE, *STREAM_OPTIONS, ("grpc.so_reuseport", 0)),
        )
        pb_grpc.add_ReplicaServiceServicer_to_server(_Service(generate), self._server)

    async def start(self, host: str) -> ReplicaAddress:
        """Listen at a free port of the host."""
        port = self._server.add_insecure_port(host_port(host, 0))
        await self._server.start()
        return ReplicaAddress(address=host_port(host, port), token=self._token)

    async def stop(self) -> None:
        """Cancel what runs, and let the gateways go."""
        await self._server.stop(None)


class _Service(pb_grpc.ReplicaServiceServicer):
    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    # Written to, not yielded from, as `GenerationService.Generate`.
    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> None:
        attached = _Attached(self._generate)
        reader = asyncio.create_task(attached.read(request_iterator))
        try:
            while (response := await attached.gained()) is not None:
                await context.write(response)
        finally:  # also when the gateway's connection has ended
            reader.cancel()
            attached.cancel_all()


class _Attached:
    """One gateway's generations. What they gained since the last message waits here, by generation."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, WaitingDeltas] = {}
        self._ends: dict[int, pb.GenerationEnd] = {}
        self._something = asyncio.Event()
        self._is_over = False

    async def read(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Do as the gateway asks, until it asks no more."""
        try:
            async for request in requests:
                if request.HasField("start"):
                    number = request.start.generation
                    task = self._tasks[number] = asyncio.create_task(self._run(number, request.start))
                    task.add_done_callback(partial(self._forget, number))
                elif request.cancel.generation in self._tasks:
                    self._tasks[request.cancel.generation].cancel()
        finally:
            self._is_over = True
            self._something.set()

    async def gained(self) -> pb.AttachResponse | None:
        """What the generations have gained, once there is something; None when the gateway asks no more."""
        await self._something.wait()
        self._something.clear()
        if self._is_over:
            return None
        waiting, self._waiting = self._waiting, {}
        ends, self._ends = self._ends, {}
        updates = [_update(number, deltas, ends.pop(number, None)) for number, deltas in waiting.items()]
        updates += [pb.GenerationUpdate(generation=number, end=end) for number, end in ends.items()]
        return pb.AttachResponse(updates=updates)

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, number: int, start: pb.StartGeneration) -> None:
        # What nobody foresaw fails the request, too; asyncio logs it.
        end = _failure(RequestError(grpc.StatusCode.INTERNAL, "", "the replica failed this request"))
        try:
            request = wire.decode_request(start.request)
            assert isinstance(request.prompt, TokenPrompt)
            generating = self._generate(request.request_id, request, request.prompt.token_ids, start.max_tokens)
            async with aclosing(generating) as deltas:
                async for delta in deltas:
                    self._waiting.setdefault(number, WaitingDeltas()).add(delta)
                    self._something.set()
            end = pb.GenerationEnd()
        except EngineDeadError:
            end = pb.GenerationEnd(engine_dead=True)
        except RequestError as error:
            end = _failure(error)
        finally:
            self._ends[number] = end
            self._something.set()

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]


def _update(number: int, deltas: WaitingDeltas, end: pb.GenerationEnd | None) -> pb.GenerationUpdate:
    delta = deltas.take()
    assert delta is not None
    return pb.GenerationUpdate(
        generation=number,
        choices=wire.encode_choices(delta.choices),
        cached_tokens=delta.cached_tokens,
        prompt_logprobs=wire.encode_positions(delta.prompt_logprobs),
        end=end,
    )


def _failure(error: RequestError) -> pb.GenerationEnd:
    code: int = error.status.value[0]
    why = str(error).removeprefix(f"{error.field}: ")
    return pb.GenerationEnd(request=pb.RequestFailure(status=code, field=error.field, why=why))
