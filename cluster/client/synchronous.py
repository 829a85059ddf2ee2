"""The client for programs without an event loop."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import grpc
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

from cluster.client.connection import Connection
from cluster.client.errors import rpc_errors
from cluster.client.info import ModelInfo, ReplicaInfo, decode_model, decode_replicas
from cluster.serving.join import join_responses
from cluster.serving.types import Request, Response
from cluster.serving.wire import decode_response, encode_request


class Client:
    """One connection, for any number of threads. Every call raises GenerationError when it fails.

    A value that a field can't hold, like a negative count, is a ValueError before anything is sent.
    """

    def __init__(self, connection: Connection | str) -> None:
        to = Connection(address=connection) if isinstance(connection, str) else connection
        credentials = to.credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(to.address, options=to.options)
        else:
            self._channel = grpc.secure_channel(to.address, credentials, options=to.options)
        self._metadata = to.metadata
        self._stub = pb_grpc.GenerationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and calls that run on it."""
        self._channel.close()

    def stream(self, request: Request, *, timeout_s: float | None = None) -> Iterator[Response]:
        """Deltas as they come. Closing the iterator cancels the request."""
        call = self._stub.Generate(encode_request(request), timeout=timeout_s, metadata=self._metadata)
        try:
            with rpc_errors():
                for message in call:
                    yield decode_response(message)
        finally:
            call.cancel()

    def generate(self, request: Request, *, timeout_s: float | None = None) -> Response:
        """The whole output."""
        return join_responses(self.stream(request, timeout_s=timeout_s))

    def generate_batch(self, requests: Sequence[Request], *, timeout_s: float | None = None) -> list[Response]:
        """The whole outputs of several requests, which run together."""
        batch = pb.GenerateBatchRequest(requests=[encode_request(request) for request in requests])
        with rpc_errors():
            answer = self._stub.GenerateBatch(batch, timeout=timeout_s, metadata=self._metadata)
        return [decode_response(message) for message in answer.responses]

    def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None) -> list[str]:
        """End requests; which of them waited or ran."""
        with rpc_errors():
            request = pb.AbortRequest(request_ids=request_ids)
            answer = self._stub.Abort(request, timeout=timeout_s, metadata=self._metadata)
        return list(answer.aborted_request_ids)

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        with rpc_errors():
            answer = self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        return decode_model(answer)

    def cluster_info(self, *, timeout_s: float | None = None) -> tuple[ReplicaInfo, ...]:
        with rpc_errors():
            answer = self._stub.GetClusterInfo(pb.GetClusterInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        return decode_replicas(answer)
