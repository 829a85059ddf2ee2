"""A refused or failed request as gRPC sends it: status, text, and google.rpc details for programs."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from cluster.serving.errors import RequestError

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Where gRPC libraries look for a google.rpc.Status in the trailing metadata."""


def trailers(error: RequestError) -> tuple[tuple[str, bytes], ...]:
    """BadRequest names the field, RetryInfo the time to wait; nothing where there is neither."""
    details: list[Message] = []
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after_s))
        details.append(retry)
    if not details:
        return ()
    code: int = error.status.value[0]
    status = status_pb2.Status(code=code, message=str(error))
    for detail in details:
        status.details.add().Pack(detail)
    return ((DETAILS_KEY, status.SerializeToString()),)


def field_and_retry(metadata: Sequence[tuple[str, str | bytes]]) -> tuple[str, float | None]:
    """What `trailers` put there: the field at fault or "", and the seconds to wait or None."""
    field, retry_after_s = "", None
    for detail in _details(metadata):
        violations, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(violations):
            field = violations.field_violations[0].field if violations.field_violations else ""
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return field, retry_after_s


def _details(metadata: Sequence[tuple[str, str | bytes]]) -> list[any_pb2.Any]:
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: RequestError) -> None:
    """End the call with the error's status."""
    await context.abort(error.status, str(error), trailers(error))
