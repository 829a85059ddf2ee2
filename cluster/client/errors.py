"""A call that failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from cluster.serving.status import field_and_retry


class GenerationError(Exception):
    """Its status, the server's words, the path of the field at fault or "", seconds to wait before a retry or None."""

    def __init__(self, status: grpc.StatusCode, details: str, field: str, retry_after_s: float | None) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status
        self.details = details
        self.field = field
        self.retry_after_s = retry_after_s


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Raise what grpc raises as ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise _translated(error) from error


def _translated(error: Any) -> GenerationError:
    metadata = [(str(key), value) for key, value in error.trailing_metadata() or ()]
    field, retry_after_s = field_and_retry(metadata)
    return GenerationError(error.code(), error.details() or "", field, retry_after_s)
