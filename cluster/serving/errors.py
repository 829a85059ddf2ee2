"""What ends a request with a status."""

import grpc


class RequestError(Exception):
    """A request that is refused or has failed: `status`, the path of the field at fault (or ""), and why.

    `retry_after_s` is a hint for those that may be repeated.
    """

    def __init__(self, status: grpc.StatusCode, field: str, why: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{field}: {why}" if field else why)
        self.status = status
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        # A replica's errors cross processes; the default would call __init__ with the finished sentence.
        why = str(self).removeprefix(f"{self.field}: ")
        return _request_error, (self.status, self.field, why, self.retry_after_s)

    def within(self, path: str) -> "RequestError":
        """The same about a request that is itself a field, like `requests[3]`."""
        why = str(self).removeprefix(f"{self.field}: ")
        field = f"{path}.{self.field}" if self.field else ""
        return RequestError(self.status, field, why, retry_after_s=self.retry_after_s)


def _request_error(status: grpc.StatusCode, field: str, why: str, retry_after_s: float | None) -> RequestError:
    return RequestError(status, field, why, retry_after_s=retry_after_s)


def invalid(field: str, why: str) -> RequestError:
    """The field's value is wrong, whatever the server."""
    return RequestError(grpc.StatusCode.INVALID_ARGUMENT, field, why)


def unimplemented(field: str, why: str) -> RequestError:
    """The field is right, but this engine can't do it."""
    return RequestError(grpc.StatusCode.UNIMPLEMENTED, field, why)


def precondition(field: str, why: str) -> RequestError:
    """The request needs what this server doesn't have."""
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, field, why)


def unavailable(why: str) -> RequestError:
    """The server can't take requests now."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, "", why)
