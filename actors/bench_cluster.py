"""A cluster of a sweep's own, with its load generator."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import answer_of, ask_health
from actors.commands.borrow import gateway
from actors.commands.down import down
from actors.coordinator import PairView
from actors.gateway import GatewayHealth
from actors.load_generator import LOAD_GENERATOR_ACTOR, choose_node
from actors.local_ray import find_local_ray
from actors.names import COORDINATOR, GATEWAY
from actors.session import session
from cluster.bench.counters import kv_cache_tokens
from cluster.bench.environment import environment
from cluster.bench.load.generator import Load, LoadProgress
from cluster.bench.load.records import LoadResult
from cluster.bench.sweep.arms import Variant
from cluster.bench.sweep.server import PROGRESS_PERIOD_S, Tell
from cluster.client import Connection, ModelInfo
from cluster.commands.generate_remote import RemoteOptions, ask_model
from cluster.config import ClusterConfig
from cluster.contract.contract import KVContract
from cluster.errors import UserError
from cluster.serving.settings import ListenSettings

_HOSTS_TIMEOUT_S: Final = 60.0
"""For every node to start a process and to ask nvidia-smi."""

_GENERATOR: Final = "load generator"


class BenchCluster:
    """A `BenchServer`: replicas are asked for their pages, the generator for its load, through Ray."""

    def __init__(self, connection: Connection, info: ModelInfo) -> None:
        self._connection = connection
        self.info = info
        self._targets = [name for name in sorted(ray.util.list_named_actors()) if name.startswith("target")]
        self._generator, where = _start_generator()
        self.facts: Mapping[str, Any] = {"generator": where, **_memory(self.pages()), "hosts": _hosts()}

    def pages(self) -> Mapping[str, str | None]:
        return {name: ask_health(name, "metrics") for name in self._targets}

    def run(self, load: Load, tell: Tell) -> LoadResult:
        answer = self._generator.run.remote(self._connection, load)
        while not ray.wait([answer], timeout=PROGRESS_PERIOD_S)[0]:
            progress: LoadProgress | None = answer_of(_GENERATOR, self._generator.progress.remote())
            if progress is not None:
                tell(progress)
        result: LoadResult = answer_of(_GENERATOR, answer)
        return result


@contextmanager
def bench_cluster(variant: Variant, access: RemoteOptions) -> Iterator[BenchCluster]:
    """Start the variant's cluster, and stop it when the block ends. What a killed sweep has left of one in that
    namespace is stopped first.

    Raises:
        UserError: it can't be started.
    """
    config = variant.config
    assert config is not None
    _stop_leftovers(config)
    address, namespace = config.ray.address, config.ray.namespace
    with gateway(address, namespace, access, config=config) as remote, session(address, namespace):
        connection = remote.connection()
        yield BenchCluster(connection, ask_model(connection))


def _stop_leftovers(config: ClusterConfig) -> None:
    if not (config.ray.address or os.environ.get("RAY_ADDRESS") or find_local_ray()):
        return  # there is no Ray yet
    with session(config.ray.address, config.ray.namespace):
        left = bool(ray.util.list_named_actors())
    if left:
        down(config.ray.address, config.ray.namespace)


def _start_generator() -> tuple[Any, str]:
    """Its handle, and where it is, for people."""
    found: GatewayHealth | None = ask_health(GATEWAY)
    if found is None:
        raise UserError("the gateway", "it doesn't answer", "look at its log, in Ray's session folder")
    host, _, _ = found.address.rpartition(":")
    engines = {
        health.host
        for name in ray.util.list_named_actors()
        if name.startswith(("target", "draft")) and (health := ask_health(name)) is not None
    }
    anywhere = not ListenSettings(host=host.strip("[]")).is_loopback
    node_id = choose_node(ray.nodes(), found.host, engines, anywhere=anywhere)
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    (address,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    beside = "an actor on a node with engines" if address in engines else "an actor on a node without engines"
    return LOAD_GENERATOR_ACTOR.options(scheduling_strategy=strategy).remote(), beside


def _memory(pages: Mapping[str, str | None]) -> dict[str, int]:
    """Of the targets' own pools, and of both sides where there is a contract: bytes of one replica."""
    memory = {"kv_tokens": kv_cache_tokens(pages)}
    pairs: list[PairView] = ask_health(COORDINATOR, "pairs") or []
    if pairs and pairs[0].contract:
        contract = KVContract.from_json(pairs[0].contract)
        memory["target_kv_bytes"] = contract.pool_bytes("target")
        memory["draft_kv_bytes"] = contract.pool_bytes("draft")
    return memory


def _hosts() -> list[dict[str, Any]]:
    """The environment of each node."""
    asked = [
        ray.remote(num_cpus=0)(environment)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False))
        .remote()
        for node in ray.nodes()
        if node["Alive"]
    ]
    try:
        hosts: list[dict[str, Any]] = ray.get(asked, timeout=_HOSTS_TIMEOUT_S)
    except RayError:
        return []
    return hosts
