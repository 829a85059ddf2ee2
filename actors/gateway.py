"""The gateway: the generation service over gRPC, in front of all replicas."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from actors.again import call_own, was_restarted
from actors.leaving import LEAVING_POLL_S, DrainedReplicas, leaving_nodes
from actors.names import GATEWAY, HEALTH, kv_namespace
from actors.remote_engine import RemoteEngine
from cluster.errors import UserError
from cluster.serving import logs
from cluster.serving.model import ServedModel
from cluster.serving.router import Drained, Router
from cluster.serving.server import GenerationServer
from cluster.serving.settings import ServerSettings

_PORT: Final = b"gateway-port"
_DRAINED: Final = b"gateway-drained"

_WILDCARDS: Final = ("0.0.0.0", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHealth:
    """`address` is HOST:PORT; choices that run are in a replica, those that wait are here."""

    host: str
    address: str
    running: int
    queued: int
    draining: bool
    drain_grace_s: float
    serving: bool
    """Whether a replica lives and isn't drained."""
    drained: tuple[str, ...]
    """Replicas that get no more requests."""


class Gateway:
    """Listens from `start` to `stop`. Ray starts it again when its process has ended: it listens where it did, and
    replicas that were drained stay so. Both are in Ray's own key-value store, which outlives it."""

    def __init__(self, settings: ServerSettings, replicas: dict[str, tuple[Any, ServedModel]]) -> None:
        """`replicas`: by name, the handle of a TargetReplica that has started and what it serves."""
        logs.to_stderr(GATEWAY)
        self._settings = settings
        self._replicas = replicas
        self._engines: dict[str, RemoteEngine] = {}
        self._router: Router | None = None
        self._server: GenerationServer | None = None
        self._starting: asyncio.Task[str] | None = None
        self._drained = DrainedReplicas()
        self._tasks: set[asyncio.Task[Any]] = set()
        if was_restarted():
            if (port := _internal_kv_get(_PORT, namespace=kv_namespace())) is not None:
                self._settings = replace(settings, port=int(port))
            if (drained := _internal_kv_get(_DRAINED, namespace=kv_namespace())) is not None:
                self._drained = DrainedReplicas(json.loads(drained))
            call_own("start")

    async def start(self) -> str:
        """The address that clients connect to. A second call waits for the first one's end.

        Raises:
            UserError: it can't be listened on, or a file of TLS can't be used.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> str:
        engines = self._engines = {
            name: RemoteEngine(handle, model) for name, (handle, model) in self._replicas.items()
        }
        self._router = Router(
            engines,
            max_moves=self._settings.max_moves,
            return_s=self._settings.return_s,
            drained=self._drained.node_of,
        )
        self._remember_drained()  # where a cluster that was killed has left some, none
        self._server = GenerationServer(self._router, self._settings, replica=GATEWAY)
        # A page is asked for in the thread of its server, the replicas in this loop.
        loop = asyncio.get_running_loop()
        metrics = self._server.service.requests.metrics
        metrics.federate(lambda: asyncio.run_coroutine_threadsafe(_pages(engines), loop).result())
        await self._server.start()
        self._keep(self._follow_nodes(self._router))
        _internal_kv_put(_PORT, self._server.address.rpartition(":")[2], overwrite=True, namespace=kv_namespace())
        return self._address

    @ray.method(concurrency_group=HEALTH)
    async def health(self) -> GatewayHealth | None:
        """None before it has started."""
        server, router = self._server, self._router
        if server is None or router is None:
            return None
        requests = server.service.requests
        return GatewayHealth(
            host=ray.util.get_node_ip_address(),
            address=self._address,
            running=requests.admission.running,
            queued=requests.admission.queued,
            draining=requests.draining,
            drain_grace_s=self._settings.drain_grace_s,
            serving=not router.dead,
            drained=tuple(sorted(router.draining)),
        )

    @ray.method(concurrency_group=HEALTH)
    async def replicas(self) -> dict[str, str]:
        """The replicas' hosts, by name; an empty one where the replica hasn't answered yet."""
        return {name: each.host for name, each in self._engines.items()}

    async def drain(self, replica: str, grace_s: float | None) -> Drained:
        """Give the replica no more requests; those that run there have `grace_s`, None for the gateway's own grace
        period, and are then moved. Raises UserError where there is no such replica."""
        if self._router is None or replica not in self._router.replicas:
            raise UserError(f"replica {replica}", f"there are {', '.join(sorted(self._replicas))}", "name one of these")
        return await self._drain(self._router, replica, self._settings.drain_grace_s if grace_s is None else grace_s)

    async def stop(self) -> None:
        """Take no more requests; those that run have the grace period."""
        for key in (_PORT, _DRAINED):
            _internal_kv_del(key, namespace=kv_namespace())
        for task in self._tasks:
            task.cancel()
        if self._server is not None and self._router is not None:
            await self._server.stop()
            await self._router.close()

    async def _drain(self, router: Router, replica: str, grace_s: float) -> Drained:
        self._drained.add(replica, self._engines[replica].node)
        self._remember_drained()
        return await router.drain(replica, grace_s)

    async def _follow_nodes(self, router: Router) -> None:
        """Drain what Ray is to take away with its node, and this gateway with its own."""
        gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        own = ray.get_runtime_context().get_node_id()
        grace_s, leaves = self._settings.drain_grace_s, False
        while True:
            await asyncio.sleep(LEAVING_POLL_S)
            try:
                leaving = await asyncio.to_thread(leaving_nodes, gcs)
            except RayError as error:
                logs.event("Ray doesn't say which nodes leave", why=str(error))
                continue
            node_of = {name: engine.node for name, engine in self._engines.items()}
            for replica, seconds in self._drained.to_drain(leaving, node_of, grace_s).items():
                self._keep(self._drain(router, replica, seconds))
            if returned := self._drained.take_returned(leaving, node_of):
                self._remember_drained()
            for replica in returned:
                router.resume(replica)
            if own in leaving and not leaves and self._server is not None:
                leaves = True
                self._keep(self._server.stop(min(grace_s, leaving[own])))

    def _remember_drained(self) -> None:
        kept = json.dumps(dict(self._drained.node_of)).encode()
        _internal_kv_put(_DRAINED, kept, overwrite=True, namespace=kv_namespace())

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do it beside what else is done here."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _address(self) -> str:
        """One that a client can use: of this host, where the server listens on all of its addresses."""
        assert self._server is not None
        host, _, port = self._server.address.rpartition(":")
        return f"{ray.util.get_node_ip_address()}:{port}" if host in _WILDCARDS else self._server.address


async def _pages(engines: Mapping[str, RemoteEngine]) -> dict[str, str | None]:
    answers = await asyncio.gather(*(engine.metrics() for engine in engines.values()))
    return dict(zip(engines, answers, strict=True))


GATEWAY_ACTOR: Final[Any] = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={HEALTH: 1})(Gateway)
