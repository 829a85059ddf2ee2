"""The gateway in front of two replicas, all of them actors in real Ray; what the replicas run is scripted.

The last test kills them.
"""

import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.gateway import GATEWAY_ACTOR, GatewayHealth
from actors.ports import free_port
from actors.target import ReplicaHealth
from cluster.client import Client, GenerationError, Sampling
from cluster.serving.settings import ServerSettings
from tests.cluster.scripted import CONFIG, SCRIPTED_ACTOR, request
from tests.cluster.waiting import eventually

DEADLINE_S = 60
NAMES = ("target-0", "target-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    gateway: Any
    replicas: dict[str, Any]
    address: str
    metrics_port: int

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=DEADLINE_S) as page:
            return page.read().decode()

    def health(self, name: str) -> ReplicaHealth:
        return ray.get(self.replicas[name].health.remote())

    def gateway_health(self) -> GatewayHealth:
        return ray.get(self.gateway.health.remote())


@pytest.fixture(scope="module")
def served(two_nodes: Cluster) -> Iterator[Served]:  # noqa: ARG001 - a session that this module's actors live in
    replicas = {name: SCRIPTED_ACTOR.remote(CONFIG, None) for name in NAMES}
    started = {name: (replica, ray.get(replica.start.remote())) for name, replica in replicas.items()}
    metrics_port = free_port("127.0.0.1")
    gateway = GATEWAY_ACTOR.remote(ServerSettings(port=0, metrics_port=metrics_port), started)
    address = ray.get(gateway.start.remote())
    yield Served(gateway=gateway, replicas=replicas, address=address, metrics_port=metrics_port)
    for each in (gateway, *replicas.values()):
        ray.kill(each)


def test_requests_share_the_replicas(served: Served) -> None:
    for replica in served.replicas.values():
        ray.get(replica.hold.remote())
    with Client(served.address) as client:
        streams = [client.stream(request()) for _ in range(4)]
        for stream in streams:
            assert next(stream).choices[0].text == "a"
        assert [served.health(name).running for name in NAMES] == [2, 2]
        assert {(info.name, info.state, info.running) for info in client.cluster_info()} == {
            ("target-0", "ready", 2),
            ("target-1", "ready", 2),
        }
        # What a client doesn't want any more, its replica doesn't make.
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        eventually(lambda: [served.health(name).running for name in NAMES] == [0, 0], deadline_s=DEADLINE_S)
    assert sum(served.health(name).requests for name in NAMES) == 4


def test_an_abort_ends_what_runs(served: Served) -> None:
    for replica in served.replicas.values():
        ray.get(replica.hold.remote())
    with Client(served.address) as client:
        stream = client.stream(request(request_id="mine"))
        next(stream)
        assert client.abort(["mine", "unknown"]) == ["mine"]
        assert [response.choices[0].finish_reason for response in stream] == ["aborted"]


def test_what_a_replica_refuses_keeps_its_status(served: Served) -> None:
    with Client(served.address) as client, pytest.raises(GenerationError) as error:
        client.generate(request(sampling=Sampling(temperature=-1.0)))
    assert error.value.status.name == "INVALID_ARGUMENT"
    assert error.value.field == "sampling.temperature"


def test_the_gateways_page_has_every_replicas_figures(served: Served) -> None:
    page = served.metrics()
    for name in NAMES:
        assert f'dspark_replica_up{{replica="{name}"}} 1.0' in page
        assert f'dspark_round_seconds_total{{part="encode",replica="{name}"}} 0.5' in page
        assert f'dspark_channel_bytes_total{{direction="to_draft",replica="{name}"}} 77.0' in page
        assert f'process_cpu_seconds_total{{replica="{name}"}}' in page
    assert "dspark_running_choices 0.0" in page
    assert page.count("# TYPE process_cpu_seconds_total counter") == 1


def test_a_gateway_that_dies_listens_where_it_did(served: Served) -> None:
    """Again and again: the next one may be there before Ray has told of the last one's end. What ran is ended."""
    for _ in range(4):
        with Client(served.address) as client:
            stream = client.stream(request())  # held
            next(stream)
            eventually(lambda: running(served) == 1, deadline_s=DEADLINE_S)
            os.kill(ray.get(served.gateway.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
            eventually(lambda: running(served) == 0, deadline_s=DEADLINE_S)

        def answers() -> bool:
            try:
                with Client(served.address) as client:
                    return next(client.stream(request())).choices[0].text == "a"
            except GenerationError:
                return False

        eventually(answers, deadline_s=DEADLINE_S)
        eventually(lambda: running(served) == 0, deadline_s=DEADLINE_S)


def test_an_engine_that_dies_in_an_actor_that_lives(two_nodes: Cluster) -> None:  # noqa: ARG001
    """The actor answers, and would refuse every move of the request in a moment: its replica is out of service until
    Ray has started it again."""
    replica = SCRIPTED_ACTOR.options(max_restarts=-1).remote(CONFIG, None)
    model = ray.get(replica.start.remote())
    ray.get(replica.hold.remote())
    gateway = GATEWAY_ACTOR.remote(ServerSettings(port=0), {"target-0": (replica, model)})
    before = ray.get(replica.process.remote())
    with Client(ray.get(gateway.start.remote())) as client:
        stream = client.stream(request())
        texts = [next(stream).choices[0].text]
        ray.get(replica.die.remote())
        try:
            texts += [response.choices[0].text for response in stream]
        except GenerationError as error:
            assert "no engine in service" in str(error)  # noqa: PT017 - where Ray takes longer than it is waited for
        else:
            assert "".join(texts) == "aaaaa"
        eventually(lambda: [info.state for info in client.cluster_info()] == ["ready"], deadline_s=DEADLINE_S)
        assert client.generate(request()).choices[0].text == "aaaaa"
    assert ray.get(replica.process.remote()) != before
    for each in (gateway, replica):
        ray.kill(each)


def test_a_replica_that_dies(served: Served) -> None:
    """Its requests go on with the other, and later ones go there; without any, they end and the gateway isn't ready."""
    for replica in served.replicas.values():
        ray.get(replica.hold.remote())
    with Client(served.address) as client:
        streams = [client.stream(request()) for _ in NAMES]
        for stream in streams:
            next(stream)
        kill(served, "target-0")
        assert next(streams[0]).choices[0].text == "a"
        assert served.health("target-1").running == 2
        assert [info.state for info in client.cluster_info()] == ["dead", "ready"]
        assert 'dspark_replica_up{replica="target-0"} 0.0' in served.metrics()
        another = client.stream(request())  # held: one that is let go ends its request
        next(another)
        assert served.health("target-1").running == 3
        kill(served, "target-1")
        with pytest.raises(GenerationError, match="no engine in service") as error:
            list(streams[0])
        assert error.value.status.name == "UNAVAILABLE"
        eventually(lambda: not served.gateway_health().serving, deadline_s=DEADLINE_S)
        with pytest.raises(GenerationError) as error:
            client.generate(request())
        assert error.value.status.name == "UNAVAILABLE"


def running(served: Served) -> int:
    return sum(served.health(name).running for name in NAMES)


def kill(served: Served, name: str) -> None:
    os.kill(ray.get(served.replicas[name].process.remote()), signal.SIGKILL)
