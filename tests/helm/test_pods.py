"""An installation lives: the rendered commands run against a real Ray of four nodes, and text comes out.

The tests stand in the order of its life.
"""

import json
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, Parse
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.client import Client, Request, Sampling, Stopping, TextPrompt
from tests.checkpoints import make_pair
from tests.cluster.waiting import eventually
from tests.helm.chart import NAME, Manifest, Rendered, ci_values, container, render
from tests.helm.pods import AGENT_PORT, Machine, Pod, unavailable
from tests.helm.test_both_sides import metrics_in

DEADLINE_S = 400
"""For `up` on a machine that does other things: it imports vLLM three times."""
SHORT_DEADLINE_S = 120

NUM_TOKENS = 100

GROUPS = ("head", "gateway", "target", "draft")

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    rendered: Rendered
    machine: Machine
    ray: dict[str, Pod]
    up: Pod
    job: Manifest

    @property
    def gateway(self) -> str:
        return f"{self.ray['gateway'].address}:{self.port('grpc')}"

    def port(self, name: str) -> int:
        ports = self.ray["gateway"].main["ports"]
        return next(port["containerPort"] for port in ports if port["name"] == name)

    def run_up(self) -> subprocess.CompletedProcess[str]:
        return self.up.run(container(self.job)["command"], deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    pair = make_pair("qwen3-dspark-agreeing", tmp_path_factory.mktemp("models"))
    engine = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 16}
    values = ci_values("cpu-serve")
    values |= {"model": {"target": str(pair.target), "draft": str(pair.draft)}, "config": {"engine": engine}}
    values |= {"monitoring": {"alerts": {"enabled": True}, "dashboard": {"enabled": True}}}
    for group in GROUPS:
        values[group]["rayStartParams"] = {"object-store-memory": "80000000"}
    rendered = render(values)
    machine = Machine(rendered, {(NAME, "auth_token"): "0123456789abcdef0123456789abcdef"})
    job = rendered.one("Job")["spec"]["template"]
    with machine.open([*GROUPS, "up", "test"]):
        ray = {name: machine.start_ray(name, rendered.groups[name]) for name in GROUPS}
        yield Release(rendered=rendered, machine=machine, ray=ray, up=machine.pod("up", job), job=job)


def notes_line(release: Release, program: str) -> list[str]:
    """The words of the one command in the notes that begins so."""
    (line,) = (line for line in release.rendered.notes.splitlines() if line.startswith(f"  {program} "))
    return shlex.split(line)


def test_the_job_brings_the_cluster_up(release: Release) -> None:
    ended = release.run_up()
    assert ended.returncode == 0, ended.stdout + release.machine.log("head")
    assert "pair 0: epoch 1, contract " in ended.stdout
    assert release.gateway in ended.stdout


def test_the_same_job_again_finds_it_up(release: Release) -> None:
    again = release.run_up()
    assert again.returncode == 0, again.stdout
    assert "contract" not in again.stdout


def test_probes_are_content(release: Release) -> None:
    probe = release.ray["gateway"].main["readinessProbe"]["grpc"]
    with grpc.insecure_channel(f"{release.ray['gateway'].address}:{probe['port']}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service=probe["service"]), timeout=SHORT_DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for pod in release.ray.values():  # KubeRay's own, since Ray 2.53
        with urllib.request.urlopen(f"http://{pod.address}:{AGENT_PORT}/api/healthz", timeout=SHORT_DEADLINE_S) as page:
            assert page.status == 200


def test_helm_test_shows_text(release: Release) -> None:
    pod = release.machine.pod("test", release.rendered.one("Pod"))
    ended = pod.run(pod.main["command"], deadline_s=SHORT_DEADLINE_S)
    assert ended.returncode == 0, ended.stdout
    *text, figures = ended.stdout.strip().splitlines()
    assert "".join(text).strip()
    assert "tokens/s" in figures


def test_the_notes_grpcurl_gets_text(release: Release) -> None:
    """By server reflection, as grpcurl does it."""
    words = notes_line(release, "grpcurl")
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
        answers = [MessageToDict(answer) for answer in call(request, timeout=SHORT_DEADLINE_S)]
    assert "".join(choice.get("text", "") for answer in answers for choice in answer.get("choices", ())).strip()


def test_the_notes_batch_is_answered(release: Release) -> None:
    words = notes_line(release, "ray job")
    (release.up.folder / "prompts.jsonl").write_text(
        '{"prompt": "Once", "max_tokens": 4}\n{"prompt": "Two", "max_tokens": 4}\n'
    )
    head = release.ray["head"]
    # The forwarded port is the head's, and the output's folder is of its volume.
    forwarded = [head.local(word).replace("localhost", head.address) for word in words]
    ended = release.up.run(forwarded, deadline_s=SHORT_DEADLINE_S)
    assert ended.returncode == 0, ended.stdout
    answers = Path(forwarded[-1]).read_text().splitlines()
    assert [json.loads(line)["index"] for line in answers] in ([0, 1], [1, 0])


def test_every_metric_that_is_asked_for_is_on_the_page(release: Release) -> None:
    with urllib.request.urlopen(
        f"http://{release.ray['gateway'].address}:{release.port('dspark-metrics')}/metrics", timeout=SHORT_DEADLINE_S
    ) as page:
        there = {line.split("{")[0].split(" ")[0] for line in page.read().decode().splitlines() if line[0] != "#"}
    (dashboard,) = (
        each for each in release.rendered.all("ConfigMap") if each["metadata"]["name"].endswith("-dashboard")
    )
    asked = metrics_in(dashboard["data"]["dspark-cluster.json"]) | metrics_in(
        str(release.rendered.one("PrometheusRule"))
    )
    assert asked <= there


def test_a_target_that_is_to_go_finishes_its_requests_first(release: Release) -> None:
    """The hook of its pod; afterwards nobody serves, and the gateway says so."""
    target = release.ray["target"]
    hook = target.main["lifecycle"]["preStop"]["exec"]["command"]
    tokens: list[int] = []
    begun = threading.Event()

    def ask() -> None:
        stopping = Stopping(max_tokens=NUM_TOKENS, ignore_eos=True)
        with Client(release.gateway) as client:
            request = Request(prompt=TextPrompt(text="Once"), sampling=Sampling(temperature=0.0), stopping=stopping)
            for answer in client.stream(request):
                tokens.extend(answer.choices[0].token_ids)
                begun.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(SHORT_DEADLINE_S)
    ended = target.run(hook, deadline_s=SHORT_DEADLINE_S, env=release.machine.ray_address("target"))
    assert ended.returncode == 0, ended.stdout
    assert "target-0 is drained" in ended.stdout
    asking.join(SHORT_DEADLINE_S)
    assert len(tokens) == NUM_TOKENS
    probe = release.ray["gateway"].main["readinessProbe"]["grpc"]
    with grpc.insecure_channel(release.gateway) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        question = health_pb2.HealthCheckRequest(service=probe["service"])
        eventually(
            lambda: health.Check(question).status == health_pb2.HealthCheckResponse.NOT_SERVING,
            deadline_s=SHORT_DEADLINE_S,
        )
