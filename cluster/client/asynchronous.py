"""The client for programs with an event loop."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Self

import grpc
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

from cluster.client.connection import Connection
from cluster.client.errors import rpc_errors
from cluster.client.info import ModelInfo, ReplicaInfo, decode_model, decode_replicas
from cluster.serving.join import join_responses
from cluster.serving.types import Request, Response
from cluster.serving.wire import decode_response, encode_request


class AsyncClient:
    """As `Client`; construct it in the event loop that uses it."""

    def __init__(self, connection: Connection | str) -> None:
        to = Connection(address=connection) if isinstance(connection, str) else connection
        credentials = to.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(to.address, options=to.options)
        else:
            self._channel = grpc.aio.secure_channel(to.address, credentials, options=to.options)
        self._metadata = to.metadata
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection, and calls that run on it."""
        await self._channel.close()

    async def stream(self, request: Request, *, timeout_s: float | None = None) -> AsyncGenerator[Response, None]:
        """Deltas as they come. Closing the generator cancels the request."""
        call = self._stub.Generate(encode_request(request), timeout=timeout_s, metadata=self._metadata)
        try:
            with rpc_errors():
                async for message in call:
                    yield decode_response(message)
        finally:
            call.cancel()

    async def generate(self, request: Request, *, timeout_s: float | None = None) -> Response:
        """The whole output."""
        return join_responses([response async for response in self.stream(request, timeout_s=timeout_s)])

    async def generate_batch(self, requests: Sequence[Request], *, timeout_s: float | None = None) -> list[Response]:
        """The whole outputs of several requests, which run together."""
        batch = pb.GenerateBatchRequest(requests=[encode_request(request) for request in requests])
        with rpc_errors():
            answer = await self._stub.GenerateBatch(batch, timeout=timeout_s, metadata=self._metadata)
        return [decode_response(message) for message in answer.responses]

    async def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None) -> list[str]:
        """End requests; which of them waited or ran."""
        with rpc_errors():
            request = pb.AbortRequest(request_ids=request_ids)
            answer = await self._stub.Abort(request, timeout=timeout_s, metadata=self._metadata)
        return list(answer.aborted_request_ids)

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        request = pb.GetModelInfoRequest()
        with rpc_errors():
            return decode_model(await self._stub.GetModelInfo(request, timeout=timeout_s, metadata=self._metadata))

    async def cluster_info(self, *, timeout_s: float | None = None) -> tuple[ReplicaInfo, ...]:
        request = pb.GetClusterInfoRequest()
        with rpc_errors():
            return decode_replicas(await self._stub.GetClusterInfo(request, timeout=timeout_s, metadata=self._metadata))
