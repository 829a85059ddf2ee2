"""The load generator as an actor of its own: away from the GPUs, where there is a node without."""

from collections.abc import Sequence
from typing import Any, Final

import ray

from actors.names import HEALTH
from cluster.bench.load.generator import Load, LoadProgress, run_load
from cluster.bench.load.records import LoadResult
from cluster.bench.sweep.server import PROGRESS_PERIOD_S
from cluster.client import AsyncClient, Connection


class LoadGeneratorActor:
    """One load at a time."""

    def __init__(self) -> None:
        self._progress: LoadProgress | None = None

    async def run(self, connection: Connection, load: Load) -> LoadResult:
        """The whole load; `progress` tells how far it is."""
        self._progress = None
        async with AsyncClient(connection) as client:
            return await run_load(client, load, self._keep, PROGRESS_PERIOD_S)

    @ray.method(concurrency_group=HEALTH)
    async def progress(self) -> LoadProgress | None:
        """None before the first second of a load."""
        return self._progress

    def _keep(self, progress: LoadProgress) -> None:
        self._progress = progress


LOAD_GENERATOR_ACTOR: Final[Any] = ray.remote(num_cpus=0, concurrency_groups={HEALTH: 1})(LoadGeneratorActor)


def choose_node(nodes: Sequence[dict[str, Any]], gateway_host: str, engine_hosts: set[str], *, anywhere: bool) -> str:
    """The id of the generator's node: without a GPU and an engine if it can be had, else without an engine, else the
    gateway's. `nodes` as `ray.nodes()` has them. Not `anywhere` is a gateway that listens on its own host alone.
    """
    alive = [node for node in nodes if node["Alive"]]
    beside_gateway = [node for node in alive if node["NodeManagerAddress"] == gateway_host]
    idle = [node for node in alive if node["NodeManagerAddress"] not in engine_hosts]
    without_gpu = [node for node in idle if not node["Resources"].get("GPU")]
    choices = [*without_gpu, *idle, *beside_gateway] if anywhere else beside_gateway
    chosen: str = choices[0]["NodeID"]
    return chosen
