"""`python -m actors.bench_faults`: what a lost draft, replica, gateway and coordinator cost a cluster's clients.

Two replicas with a draft worker each, in a Ray of this machine, under load. As `cluster.bench.faults`, which needs no
Ray, each row compares what came of its fault with its bar; the exit code is 1 where one isn't met.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from actors.bench_faults.rows import MAX_RUNNING, NAMESPACE, REPLICAS, ClusterBench
from actors.commands.up import clock
from actors.session import session
from actors.up import up
from cluster.bench.faults.figures import Row
from cluster.bench.faults.report import run_rows
from cluster.commands.terminal import DebugOption, JsonOption, command
from cluster.config import ClusterConfig, GatewayConfig, ModelConfig, PoolConfig, PoolsConfig, RayConfig
from cluster.engine.settings import EngineOptions


@contextmanager
def running_cluster(target: str, draft: str, requests: int, say: Callable[[str], None]) -> Iterator[ClusterBench]:
    """Start one, with a load of so many requests, and stop it when the block ends.

    Raises:
        UserError: it doesn't start, or doesn't answer as it should.
    """
    config = ClusterConfig(
        model=ModelConfig(target=target, draft=draft),
        engine=EngineOptions(max_model_len=256, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=64, num_gpu_blocks=16),
        pools=PoolsConfig(replicas=REPLICAS, target=PoolConfig(num_cpus=0.1), draft=PoolConfig(num_cpus=0.1)),
        gateway=GatewayConfig(port=0),
        ray=RayConfig(namespace=NAMESPACE),
    )
    with session(None, NAMESPACE, start=True, say=say):
        address = up(config, say).address
    bench = ClusterBench(address=address)
    try:
        say("runs the load without a fault")
        bench.begin(requests)
        yield bench
    finally:
        bench.stop()


@command
def main(
    target: Annotated[str, typer.Option(help="The target's folder.")],
    draft: Annotated[str, typer.Option(help="The draft's folder.")],
    requests: Annotated[int, typer.Option(min=18, help="Of a load.")] = 200,
    kills: Annotated[int, typer.Option(min=1, help="Of a draft's and of a replica's process.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="A row by its name, once or more; default: all.")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Let a cluster's drafts, replicas, gateway and coordinator be killed, and a replica be drained, under load."""
    say = clock()
    with running_cluster(target, draft, requests, say) as bench:
        work: dict[str, Callable[[], Row]] = {
            "draft": lambda: bench.draft_killed(kills),
            "replica": lambda: bench.replica_killed(kills),
            "services": bench.services_killed,
            "drain": bench.replica_drained,
            "end": bench.stopped,
        }
        run_rows(work, only, say, json_output=json_output)


if __name__ == "__main__":
    typer.run(main)
