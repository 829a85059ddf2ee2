"""The gateway in front of two replicas, all of them actors in real Ray; what the replicas run is scripted.

The last test kills them.
"""

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental.internal_kv import _internal_kv_list

from actors.gateway import GATEWAY_ACTOR, GatewayHealth
from actors.names import HEALTH, kv_namespace
from actors.ports import free_port
from actors.target import ReplicaHealth
from cluster.client import Client, GenerationError, Sampling
from cluster.config import ClusterConfig, ModelConfig
from cluster.serving.settings import ServerSettings
from tests.cluster.scripted import CONFIG, SCRIPTED_ACTOR, ScriptedReplica, request
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


@contextmanager
def serving(replicas: dict[str, Any]) -> Iterator[Served]:
    started = {name: (replica, ray.get(replica.start.remote())) for name, replica in replicas.items()}
    metrics_port = free_port("127.0.0.1")
    gateway = GATEWAY_ACTOR.remote(ServerSettings(port=0, metrics_port=metrics_port), started)
    address = ray.get(gateway.start.remote())
    try:
        yield Served(gateway=gateway, replicas=replicas, address=address, metrics_port=metrics_port)
    finally:
        for each in (gateway, *replicas.values()):
            ray.kill(each)


@pytest.fixture(scope="module")
def served(two_nodes: Cluster) -> Iterator[Served]:  # noqa: ARG001 - a session that this module's actors live in
    with serving({name: SCRIPTED_ACTOR.remote(CONFIG, None) for name in NAMES}) as served:
        yield served


class SlowReplica(ScriptedReplica):
    """Loads as long as the file that its config has for a target isn't there."""

    def _build(self) -> Any:
        while not Path(self._config.model.target).exists():
            time.sleep(0.02)
        return super()._build()


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
            kill_gateway(served)
            eventually(lambda: running(served) == 0, deadline_s=DEADLINE_S)
        eventually(lambda: answers(served), deadline_s=DEADLINE_S)
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


def test_a_gateway_that_dies_gives_nothing_to_drained_replicas(two_nodes: Cluster) -> None:  # noqa: ARG001
    with serving({name: SCRIPTED_ACTOR.remote(CONFIG, None) for name in NAMES}) as served:
        ray.get(served.gateway.drain.remote("target-0", 0.0))
        kill_gateway(served)
        eventually(lambda: answers(served), deadline_s=DEADLINE_S)
        assert served.gateway_health().drained == ("target-0",)
        with Client(served.address) as client:
            assert [info.state for info in client.cluster_info()] == ["draining", "ready"]
        assert served.health("target-0").requests == 0
        ray.get(served.gateway.stop.remote())
        assert _internal_kv_list(b"gateway-", namespace=kv_namespace()) == []


def test_a_gateway_that_dies_while_a_replica_loads(two_nodes: Cluster, tmp_path: Path) -> None:  # noqa: ARG001
    """The new one hasn't seen the replica's end, and isn't ready before the replica is."""
    (tmp_path / "weights").touch()
    config = ClusterConfig(model=ModelConfig(target=str(tmp_path / "weights")))
    actor = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={HEALTH: 1})(SlowReplica)
    with serving({"target-0": actor.remote(config, None)}) as served:
        (tmp_path / "weights").unlink()
        kill(served, "target-0")
        eventually(lambda: not served.gateway_health().serving, deadline_s=DEADLINE_S)
        kill_gateway(served)
        eventually(lambda: listens(served), deadline_s=DEADLINE_S)
        eventually(lambda: not served.gateway_health().serving, deadline_s=DEADLINE_S)
        with Client(served.address) as client, pytest.raises(GenerationError, match="no engine in service"):
            client.generate(request(), timeout_s=DEADLINE_S)
        (tmp_path / "weights").touch()
        eventually(lambda: answers(served), deadline_s=DEADLINE_S)


def test_a_replica_that_stands_still(two_nodes: Cluster) -> None:  # noqa: ARG001
    """What runs there goes on with the other, and neither an abort nor a prompt waits for it."""
    with serving({name: SCRIPTED_ACTOR.remote(CONFIG, None) for name in NAMES}) as served:
        ray.get([replica.hold.remote() for replica in served.replicas.values()])
        process = ray.get(served.replicas["target-0"].process.remote())
        with Client(served.address) as client:
            streams = [client.stream(request(request_id=name), timeout_s=DEADLINE_S) for name in ("mine", "yours")]
            for stream in streams:
                next(stream)
            os.kill(process, signal.SIGSTOP)
            try:
                assert client.abort(["yours"], timeout_s=DEADLINE_S) == ["yours"]
                assert [response.choices[0].finish_reason for response in streams[1]] == ["aborted"]
                assert next(streams[0]).choices[0].text == "a"
                assert [info.state for info in client.cluster_info()] == ["dead", "ready"]
                ray.get(served.replicas["target-1"].go.remote())
                os.kill(process, signal.SIGCONT)
                eventually(lambda: client.cluster_info()[0].state == "ready", deadline_s=DEADLINE_S)
                os.kill(process, signal.SIGSTOP)  # its prompt is there, before anybody knows
                assert client.generate(request(), timeout_s=DEADLINE_S).choices[0].text == "aaaaa"
            finally:
                os.kill(process, signal.SIGCONT)


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


def answers(served: Served) -> bool:
    try:
        with Client(served.address) as client:
            return next(client.stream(request())).choices[0].text == "a"
    except GenerationError:
        return False


def listens(served: Served) -> bool:
    try:
        with Client(served.address) as client:
            return bool(client.cluster_info())
    except GenerationError:
        return False


def kill_gateway(served: Served) -> None:
    os.kill(ray.get(served.gateway.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def kill(served: Served, name: str) -> None:
    os.kill(ray.get(served.replicas[name].process.remote()), signal.SIGKILL)
