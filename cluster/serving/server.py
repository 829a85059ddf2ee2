"""The gRPC server around an engine: generation, health, reflection, TLS, metrics, and an orderly end.

An actor or a command only wraps it: `start`, `wait_until_dead`, `stop`.
"""

import asyncio
import contextlib
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

import grpc
from dspark.v1 import generation_pb2_grpc as pb_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.errors import UserError
from cluster.serving import logs
from cluster.serving.auth import BearerToken
from cluster.serving.engine import GenerationEngine
from cluster.serving.service import SERVICE_NAME, GenerationService
from cluster.serving.settings import ServerSettings, TlsSettings, read_pem

ENGINE_CHECK_PERIOD_S: Final = 0.02
"""An engine that is dead, or of whose replicas the last is drained, is known within this time, also when nobody asks it
for anything."""

_LAST_ANSWERS_S: Final = 0.5
"""For what the last requests have still to send, when they have ended."""

_PING_INTERVAL_MS: Final = 5_000
"""How often a client may ping a connection on which nothing else moves."""


class GenerationServer:
    """Listens from `start` to `stop`. The engine is given, and stays the giver's to close."""

    def __init__(self, engine: GenerationEngine, settings: ServerSettings, *, replica: str = "replica-0") -> None:
        self._engine = engine
        self._settings = settings
        self._service = GenerationService(engine, settings.limits, replica=replica)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[] if settings.token is None else [BearerToken(settings.token)],
            options=_options(settings),
        )
        pb_grpc.add_GenerationServiceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._port = 0
        self._metrics: WSGIServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._died = asyncio.Event()

    @property
    def service(self) -> GenerationService:
        """What answers."""
        return self._service

    @property
    def address(self) -> str:
        """HOST:PORT, with the port that was taken."""
        return host_port(self._settings.host, self._port)

    @property
    def metrics_port(self) -> int | None:
        """The port that serves /metrics, if one does."""
        return None if self._metrics is None else self._metrics.server_port

    async def start(self) -> None:
        """Listen and be ready. Raises UserError where an address or a file can't be used."""
        self._port = self._listen()
        if self._settings.metrics_port is not None:
            metrics = self._service.requests.metrics
            self._metrics = metrics.serve(self._settings.metrics_host, self._settings.metrics_port)
        await self._server.start()
        await self._set_ready(True)
        self._watching = asyncio.create_task(self._watch_engine())
        logs.event("listening", address=self.address, tls=self._settings.tls is not None)

    async def wait_until_dead(self) -> None:
        """Return when the engine has died."""
        await self._died.wait()

    async def stop(self, grace_s: float | None = None) -> None:
        """Not ready first, so that nobody is sent here; then no new requests; then the last ones end or are cut off,
        after `grace_s`, None for the settings' own grace period."""
        grace_s = self._settings.drain_grace_s if grace_s is None else grace_s
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._set_ready(False)
        logs.event("draining")
        await self._service.requests.drain(0.0 if self._engine.dead else grace_s)
        # Not the whole grace: watches of the health service end with the server alone.
        await self._server.stop(_LAST_ANSWERS_S)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.shutdown)
            self._metrics.server_close()
            self._metrics = None
        logs.event("stopped")

    def _listen(self) -> int:
        wanted = host_port(self._settings.host, self._settings.port)
        try:
            if self._settings.tls is None:
                return self._server.add_insecure_port(wanted)
            return self._server.add_secure_port(wanted, _credentials(self._settings.tls))
        except RuntimeError as error:
            raise UserError(f"address {wanted}", "it can't be listened on", "choose another host or port") from error

    async def _watch_engine(self) -> None:
        """Ready while the engine lives: a cluster's replicas may come back."""
        ready = True
        while True:
            if self._engine.dead is ready:
                ready = not ready
                await self._set_ready(ready)
                logs.event("engine is back" if ready else "engine died")
                if not ready:
                    self._died.set()
            await asyncio.sleep(ENGINE_CHECK_PERIOD_S)

    async def _set_ready(self, ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.ServingStatus.Value("SERVING" if ready else "NOT_SERVING")
        await self._health.set(SERVICE_NAME, serving)


def _options(settings: ServerSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.limits.max_message_bytes),
        ("grpc.max_send_message_length", settings.limits.max_response_bytes),
        # Without it a second server on the same port takes half of its calls.
        ("grpc.so_reuseport", 0),
        # A client may ping through a long call without being hung up on for it. These are gRPC-Core's keys: there is
        # no "min_recv_ping_interval_without_data_ms", though it is often written.
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    pair = (read_pem(tls.key, what="TLS key"), read_pem(tls.certificate, what="TLS certificate"))
    if tls.client_ca is None:
        return grpc.ssl_server_credentials([pair])
    authority = read_pem(tls.client_ca, what="client CA")
    return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=True)


def host_port(host: str, port: int) -> str:
    """As gRPC reads it, an IPv6 host too."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
