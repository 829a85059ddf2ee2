"""Prometheus figures: vLLM's own under its names, and the service's under `dspark_`.

AsyncLLM's stat loggers run in this process, so `vllm:spec_decode_num_accepted_tokens` and its kin are in the default
registry of prometheus_client; the endpoint serves both. A gateway's engines are in
other processes: it adds their pages.
"""

from collections.abc import Callable, Iterator, Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
from prometheus_client.registry import Collector

from cluster.errors import UserError
from cluster.serving.admission import Admission
from cluster.serving.federation import federated

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServiceMetrics:
    """The service's figures, in a registry of their own: several services may live in one process."""

    def __init__(self, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self._replicas: Callable[[], Mapping[str, str | None]] = dict
        self.registry.register(_Collected(self._collect))
        self._calls = Counter(
            "dspark_grpc_requests", "Calls by method and status.", ["method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "dspark_grpc_request_seconds", "Time of a call.", ["method"], buckets=_SECONDS, registry=self.registry
        )
        self._queue_seconds = Histogram(
            "dspark_queue_seconds", "Time until a request ran.", buckets=_SECONDS, registry=self.registry
        )
        self._gauge("dspark_running_choices", "Choices that run.", lambda: admission.running)
        self._gauge("dspark_queued_choices", "Choices that wait.", lambda: admission.queued)

    def ended(self, method: str, status: str, seconds: float) -> None:
        self._calls.labels(method, status).inc()
        self._seconds.labels(method).observe(seconds)

    def admitted(self, seconds: float) -> None:
        self._queue_seconds.observe(seconds)

    def federate(self, replicas: Callable[[], Mapping[str, str | None]]) -> None:
        """Add each replica's page, which `replicas` fetches whenever somebody asks, in that server's thread."""
        self._replicas = replicas

    def follow_moves(self, read: Callable[[], int]) -> None:
        """Show how often requests have been moved."""
        self._gauge("dspark_moved_requests", "Requests that went on with another replica, so far.", read)

    def serve(self, host: str, port: int) -> WSGIServer:
        """Serve /metrics in a thread; port 0 takes a free one. Raises UserError where the port can't be had."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise UserError(f"metrics port {port}", str(error), "choose another with --metrics-port") from error
        return server

    def _collect(self) -> Iterator[Metric]:
        replicas = self._replicas()
        return federated(REGISTRY.collect(), replicas) if replicas else iter(REGISTRY.collect())

    def _gauge(self, name: str, words: str, read: Callable[[], int]) -> None:
        Gauge(name, words, registry=self.registry).set_function(read)


class _Collected(Collector):
    """What a function gives."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()
