"""The optional bearer token: one secret that every call carries, health checks excepted.

Probes of an orchestrator can't send one, and health says nothing of a request; reflection needs it.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import grpc

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in its stubs alone
    Context = grpc.aio.ServicerContext[Any, Any]

METADATA_KEY: Final = "authorization"
SCHEME: Final = "Bearer "
_OPEN: Final = "/grpc.health.v1.Health/"


class BearerToken(grpc.aio.ServerInterceptor):
    """Ends every call without the token in UNAUTHENTICATED."""

    def __init__(self, token: str) -> None:
        self._expected = f"{SCHEME}{token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN) or self._authentic(handler_call_details):
            return handler
        return _refusing(handler)

    def _authentic(self, details: grpc.HandlerCallDetails) -> bool:
        given = dict(details.invocation_metadata).get(METADATA_KEY, "")
        # In a time that doesn't tell how much of it is right.
        return hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._expected)


def _refusing(handler: "Handler") -> "Handler":
    """A handler of the same shape that lets nobody in."""

    async def refuse(_: Any, context: "Context") -> None:
        why = "the call needs the server's token: metadata 'authorization: Bearer TOKEN'"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    made: Any
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            made = grpc.unary_unary_rpc_method_handler
        case False, True:
            made = grpc.unary_stream_rpc_method_handler
        case True, False:
            made = grpc.stream_unary_rpc_method_handler
        case _:
            made = grpc.stream_stream_rpc_method_handler
    refusing: Handler = made(refuse, handler.request_deserializer, handler.response_serializer)
    return refusing
