"""An installation lives: the rendered commands run in pods of this machine, with a real Ray of four nodes, and text
comes out.

The tests stand in the order of its life.
"""

import json
import shlex
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, Parse
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.client import Client, GenerationError, Request, Sampling, Stopping, TextPrompt
from tests.checkpoints import make_pair
from tests.cluster.waiting import eventually
from tests.helm.chart import NAME, Manifest, Rendered, ci_values, container, render
from tests.helm.pods import AGENT_PORT, Machine, Pod, machine, run, unavailable
from tests.helm.test_both_sides import metrics_in

RAY_DEADLINE_S = 240
UP_DEADLINE_S = 400
"""On a machine that does other things: it imports vLLM three times."""
DEADLINE_S = 120

TOKEN = "0123456789abcdef0123456789abcdef"
NUM_TOKENS = 60

GROUPS = ("head", "gateway", "target", "draft")

UP_AT_ONCE = """
import sys
sys.path.insert(0, "/etc/dspark-cluster/config")
import up
up.MOVE_S, up.ENTRYPOINT = 0.0, "echo begins again"
sys.exit(up.main(*sys.argv[1:]))
"""
"""up.py for a gateway that can't be reached: it waits for nothing, and starts nothing."""

LOSE_GATEWAY = """
import ray
from actors.names import GATEWAY
from cluster.config import DEFAULT_NAMESPACE
ray.init(namespace=DEFAULT_NAMESPACE)
ray.kill(ray.get_actor(GATEWAY), no_restart=True)
"""

WHY_NOT = unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    rendered: Rendered = field(repr=False)
    machine: Machine
    ray: dict[str, Pod] = field(repr=False)
    job: Manifest = field(repr=False)
    """The pod that brings the cluster up."""
    said: str = field(repr=False)
    """What it wrote."""
    gateway: str
    """The forwarded address."""

    @property
    def probe(self) -> Manifest:
        return self.ray["gateway"].main["readinessProbe"]["grpc"]

    def port(self, name: str) -> int:
        ports = self.ray["gateway"].main["ports"]
        return next(port["containerPort"] for port in ports if port["name"] == name)

    def notes_line(self, program: str) -> list[str]:
        """The words of the one command in the notes that begins so."""
        (line,) = (line for line in self.rendered.notes.splitlines() if line.startswith(f"  {program} "))
        return shlex.split(line)

    def page(self, pod: str, port: int, path: str) -> str:
        address = self.machine.forward(self.ray[pod], port)
        with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as page:
            text: str = page.read().decode()
        return text

    def keep(self) -> tuple[int, str]:
        """What the job that keeps the cluster up ends with, and says, where the gateway's service has no pod."""
        job = self.rendered.one("CronJob")["spec"]["jobTemplate"]["spec"]["template"]
        python, script, *arguments, _ = container(job)["command"]
        assert script.endswith("/up.py")
        closed = "1"
        ended = self.machine.pod("up", job).run([python, "-c", UP_AT_ONCE, *arguments, closed], deadline_s=DEADLINE_S)
        return ended.returncode, ended.stdout

    def health(self) -> int:
        """As Kubernetes asks by the gateway's readiness probe."""
        question = health_pb2.HealthCheckRequest(service=self.probe["service"])
        with grpc.insecure_channel(self.gateway) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            status: int = stub.Check(question, timeout=DEADLINE_S).status
        return status


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    pair = make_pair("qwen3-dspark-agreeing", tmp_path_factory.mktemp("models"))
    engine = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 16}
    values = ci_values("cpu-serve")
    values["model"] = {"target": str(pair.target), "draft": str(pair.draft)}
    # What a machine that does other things needs: no draft is too slow, and running requests have time.
    values["config"] = {"engine": engine, "channel": {"stall_limit_s": None}}
    values["gateway"]["drainGraceSeconds"] = DEADLINE_S
    values["monitoring"] = {"alerts": {"enabled": True}, "dashboard": {"enabled": True}}
    for group in GROUPS:
        values[group]["rayStartParams"] = {"object-store-memory": "80000000"}
    return render(values)


@pytest.fixture(scope="module")
def release(rendered: Rendered) -> Iterator[Release]:
    job = rendered.one("Job")["spec"]["template"]
    with machine(rendered, {(NAME, "auth_token"): TOKEN}, [*GROUPS, "up", "test"]) as pods:
        ray = pods.start_ray({name: rendered.groups[name] for name in GROUPS}, deadline_s=RAY_DEADLINE_S)
        ended = pods.pod("up", job).run(container(job)["command"], deadline_s=UP_DEADLINE_S)
        assert ended.returncode == 0, ended.stdout
        gateway = ray["gateway"].main["readinessProbe"]["grpc"]["port"]
        yield Release(
            rendered=rendered,
            machine=pods,
            ray=ray,
            job=job,
            said=ended.stdout,
            gateway=pods.forward(ray["gateway"], gateway),
        )


def test_the_job_brings_the_cluster_up(release: Release) -> None:
    assert "pair 0: epoch 1, contract " in release.said
    assert f"{release.ray['gateway'].address}:{release.port('grpc')}" in release.said


def test_the_same_job_again_finds_it_up(release: Release) -> None:
    again = release.machine.pod("up", release.job).run(container(release.job)["command"], deadline_s=DEADLINE_S)
    assert again.returncode == 0, again.stdout
    assert "contract" not in again.stdout


def test_probes_are_content(release: Release) -> None:
    assert release.health() == health_pb2.HealthCheckResponse.SERVING
    for pod in GROUPS:  # KubeRay's own, since Ray 2.53
        assert "success" in release.page(pod, AGENT_PORT, "/api/healthz")


def test_helm_test_shows_text(release: Release) -> None:
    pod = release.machine.pod("test", release.rendered.one("Pod"))
    ended = pod.run(pod.main["command"], deadline_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout
    *text, figures = ended.stdout.strip().splitlines()
    assert "".join(text).strip()
    assert "tokens/s" in figures


def test_the_notes_grpcurl_gets_text(release: Release) -> None:
    """By server reflection, as grpcurl does it."""
    words = release.notes_line("grpcurl")
    assert words[1:3] == ["-plaintext", "-d"]
    body, address, method = words[3:]
    assert address == f"localhost:{release.port('grpc')}"  # the forwarded one
    with grpc.insecure_channel(release.gateway) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service, _, name = method.rpartition("/")
        described = pool.FindServiceByName(service).methods_by_name[name]
        call = channel.unary_stream(
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        request = Parse(body, GetMessageClass(described.input_type)())
        answers = [MessageToDict(answer) for answer in call(request, timeout=DEADLINE_S)]
    assert "".join(choice.get("text", "") for answer in answers for choice in answer.get("choices", ())).strip()


def test_the_notes_batch_is_answered(release: Release, tmp_path: Path) -> None:
    """Submitted from outside, with a prompts.jsonl of the folder it is submitted from."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once", "max_tokens": 4}\n{"prompt": "Two", "max_tokens": 4}\n')
    head = release.ray["head"]
    forwarded = release.machine.forward(head, 8265)
    words = [head.local(word.replace("localhost:8265", forwarded)) for word in release.notes_line("ray job")]
    ended = run(words, deadline_s=DEADLINE_S, env=release.machine.environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    answers = Path(words[-1]).read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in answers) == [0, 1]


def test_every_metric_that_is_asked_for_is_on_the_page(release: Release) -> None:
    page = release.page("gateway", release.port("dspark-metrics"), "/metrics")
    there = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line[0] != "#"}
    (dashboard,) = (
        each for each in release.rendered.all("ConfigMap") if each["metadata"]["name"].endswith("-dashboard")
    )
    asked = metrics_in(dashboard["data"]["dspark-cluster.json"]) | metrics_in(
        str(release.rendered.one("PrometheusRule"))
    )
    assert asked <= there


def test_a_target_that_is_to_go_finishes_its_requests_first(release: Release) -> None:
    """The hook of its pod, under requests that come one after the other; then none is taken, and the probe says so."""
    begun = threading.Event()
    lengths: list[int] = []
    refused: list[GenerationError] = []

    def ask() -> None:
        stopping = Stopping(max_tokens=NUM_TOKENS, ignore_eos=True)
        request = Request(prompt=TextPrompt(text="Once"), sampling=Sampling(temperature=0.0), stopping=stopping)
        with Client(release.gateway) as client:
            while not refused:
                try:
                    for answer in client.stream(request, timeout_s=DEADLINE_S):
                        if not begun.is_set():
                            begun.set()
                        lengths.append(len(answer.choices[0].token_ids))
                except GenerationError as error:
                    refused.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert begun.wait(DEADLINE_S)
    target = release.ray["target"]
    hook = target.main["lifecycle"]["preStop"]["exec"]["command"]
    ended = target.run(hook, deadline_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout
    assert "target-0 is drained" in ended.stdout
    asking.join(DEADLINE_S)
    assert [error.status.name for error in refused] == ["UNAVAILABLE"]
    assert sum(lengths) % NUM_TOKENS == 0, "the last one was cut off"
    eventually(lambda: release.health() == health_pb2.HealthCheckResponse.NOT_SERVING, deadline_s=DEADLINE_S)


def test_a_cluster_that_cannot_be_reached_and_has_its_gateway_is_left_alone(release: Release) -> None:
    """As long as its only replica loads, or, like here, is drained."""
    code, said = release.keep()
    assert code == 0, said
    assert said.splitlines()[-1] == "not reached, but Ray has the gateway (ALIVE): the cluster comes back by itself"
    assert "begins again" not in said


def test_a_cluster_that_has_lost_its_gateway_is_started_again(release: Release) -> None:
    lost = release.ray["head"].run(["python", "-c", LOSE_GATEWAY], deadline_s=DEADLINE_S)
    assert lost.returncode == 0, lost.stdout

    def begins_again() -> bool:  # once Ray's list of actors has it
        code, said = release.keep()
        return code == 0 and "begins again" in said

    eventually(begins_again, deadline_s=DEADLINE_S)
