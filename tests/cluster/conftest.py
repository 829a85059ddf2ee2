"""One Ray cluster of two nodes on this machine, for all tests of this folder."""

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.local_ray import AGENT_PATIENCE

NAMESPACE = "tests"


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[Cluster]:
    """A node of the target's pool with 2 CPUs and one of the draft's with 1, and this process joined to them.

    Ray is told of two GPUs in the first, which it gives to who asks for them; nothing here uses one.
    """
    with pytest.MonkeyPatch.context() as environment:
        # Ray would make a token in the home folder; these nodes live for minutes, on this machine.
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv(*AGENT_PATIENCE)
        cluster = Cluster(
            initialize_head=True,
            # `ray job submit` talks to the dashboard, and that to its agent; ports that aren't named are free ones.
            head_node_args={
                "num_cpus": 2,
                "num_gpus": 2,
                "labels": {"pool": "target"},
                "include_dashboard": True,
                "dashboard_port": None,
                "dashboard_agent_listen_port": None,
            },
        )
        try:
            cluster.add_node(num_cpus=1, labels={"pool": "draft"})
            ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
