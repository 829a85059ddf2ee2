"""A gateway's end of its stream with one replica: hands each generation what is its own.

A client that is slow gets fewer and larger deltas: what waits for it is one.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

import grpc
from dspark.v1 import replica_pb2 as pb
from dspark.v1 import replica_pb2_grpc as pb_grpc

from cluster.control.options import CLIENT_KEEPALIVE
from cluster.serving import logs, wire
from cluster.serving.auth import METADATA_KEY, SCHEME
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.errors import RequestError
from cluster.serving.replica_server import STREAM_OPTIONS, ReplicaAddress
from cluster.serving.types import Request, TokenPrompt
from cluster.serving.waiting import WaitingDeltas

_OPTIONS: Final = (
    *CLIENT_KEEPALIVE,
    *STREAM_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # a replica is a neighbour
)

_STATUSES: Final = {status.value[0]: status for status in grpc.StatusCode}


class ReplicaLink:
    """Connects on construction, in the event loop that uses it. Once closed, by `close` or with its replica, it is of
    no more use."""

    def __init__(self, to: ReplicaAddress) -> None:
        self._to = to
        self._numbers = itertools.count(1)
        self._mailboxes: dict[int, _Mailbox] = {}
        self._requests = asyncio.Queue[pb.AttachRequest]()
        self._closed = False
        self._messages = 0
        self._reading = asyncio.create_task(self._read())

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def messages(self) -> int:
        """That have come so far, which are signs of life."""
        return self._messages

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        """As `GenerationEngine.generate`, but that deltas which wait become one. EngineDeadError once the link is
        closed, too."""
        if self._closed:
            raise EngineDeadError("the replica is lost")
        number, mailbox = next(self._numbers), _Mailbox()
        self._mailboxes[number] = mailbox
        request = replace(request, request_id=request_id, prompt=TokenPrompt(token_ids=prompt_token_ids))
        start = pb.StartGeneration(generation=number, request=wire.encode_request(request), max_tokens=max_tokens)
        self._requests.put_nowait(pb.AttachRequest(start=start))
        try:
            while (delta := await mailbox.next()) is not None:
                yield delta
        finally:
            del self._mailboxes[number]
            if not mailbox.ended:
                self._requests.put_nowait(pb.AttachRequest(cancel=pb.CancelGeneration(generation=number)))

    def close(self) -> None:
        """Generations that run end at once, here with EngineDeadError."""
        self._end_all()
        self._reading.cancel()

    async def _read(self) -> None:
        channel = grpc.aio.insecure_channel(self._to.address, options=_OPTIONS)
        try:
            stub: Any = pb_grpc.ReplicaServiceStub(channel)
            call = stub.Attach(self._asked(), metadata=((METADATA_KEY, f"{SCHEME}{self._to.token}"),))
            async for response in call:
                self._messages += 1
                for update in response.updates:
                    mailbox = self._mailboxes.get(update.generation)
                    if mailbox is not None:  # else its client has gone
                        mailbox.put(update)
        except grpc.aio.AioRpcError as error:
            logs.event("replica's stream broke", address=self._to.address, why=error.details())
        finally:
            self._end_all()
            await channel.close()

    async def _asked(self) -> AsyncGenerator[pb.AttachRequest, None]:
        while True:
            yield await self._requests.get()

    def _end_all(self) -> None:
        self._closed = True
        for mailbox in self._mailboxes.values():
            mailbox.end(EngineDeadError("the replica is lost"))


class _Mailbox:
    """What has come for one generation, and how that ended."""

    def __init__(self) -> None:
        self._waiting = WaitingDeltas()
        self._failure: Exception | None = None
        self._something = asyncio.Event()
        self.ended = False

    def put(self, update: pb.GenerationUpdate) -> None:
        if update.choices or update.prompt_logprobs:
            delta = EngineDelta(
                choices=wire.decode_choices(update.choices),
                cached_tokens=update.cached_tokens,
                prompt_logprobs=wire.decode_positions(update.prompt_logprobs),
            )
            self._waiting.add(delta)
            self._something.set()
        if update.HasField("end"):
            self.end(_failure(update.end))

    def end(self, failure: Exception | None) -> None:
        """The first end counts."""
        if not self.ended:
            self.ended, self._failure = True, failure
            self._something.set()

    async def next(self) -> EngineDelta | None:
        """What waits, once there is something; None after an orderly end. Raises what the generation failed with."""
        await self._something.wait()
        if (delta := self._waiting.take()) is not None:
            if not self.ended:
                self._something.clear()
            return delta
        if self._failure is not None:
            raise self._failure
        return None


def _failure(end: pb.GenerationEnd) -> Exception | None:
    match end.WhichOneof("failure"):
        case "engine_dead":
            return EngineDeadError("the replica's engine has died")
        case "request":
            return RequestError(_STATUSES[end.request.status], end.request.field, end.request.why)
    return None
