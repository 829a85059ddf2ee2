"""`dspark-cluster serve` as a user starts it, of a target alone; the last test kills its engine."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import Client, Connection, GenerationError
from cluster.engine.in_process import InProcessEngine
from cluster.serving.service import SERVICE_NAME
from tests.checkpoints import TinyPair
from tests.serving.conftest import MAX_MODEL_LEN
from tests.serving.requests import MEDIUM, SHORT, alone_request, greedy

DEADLINE_S = 300
TOKEN = "correct-horse"


@dataclass(frozen=True, kw_only=True)
class Served:
    process: subprocess.Popen[str]
    address: str
    log: Path
    token_file: Path

    @property
    def connection(self) -> Connection:
        return Connection(address=self.address, token=TOKEN)


@pytest.fixture(scope="module")
def served(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    token_file, log = folder / "token", folder / "log"
    token_file.write_text(TOKEN)
    options = ["--target", pair.target, "--port", 0, "--token-file", token_file, "--max-model-len", MAX_MODEL_LEN]
    words = [sys.executable, "-m", "cluster.cli", "serve", *map(str, options)]
    with log.open("w") as errors, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving {pair.target} on 127.0.0.1:"), log.read_text()
        address = line.split(" on ")[1].split(";")[0]
        yield Served(process=process, address=address, log=log, token_file=token_file)
        process.terminate()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.connection) as client:
        yield client


def test_a_stream_is_what_the_target_makes_and_has_no_speculation_figures(
    client: Client, alone: InProcessEngine
) -> None:
    choice = client.generate(greedy(MEDIUM, 8)).choices[0]
    assert choice.token_ids == alone.generate([alone_request(MEDIUM, 8)])[0].token_ids
    assert choice.speculation is None
    assert client.model_info().draft is None


def test_what_speculation_excludes_can_be_asked_for(client: Client) -> None:
    biased = client.generate(greedy(SHORT, 4, sampling={"logit_bias": ((333, 100.0),)}))
    assert biased.choices[0].token_ids == (333,) * 4
    most_probable = client.generate(greedy(SHORT, 6)).choices[0].token_ids
    # No other token is as probable as the most probable one.
    drawn = client.generate(greedy(SHORT, 6, sampling={"temperature": 2.0, "min_p": 1.0}))
    assert drawn.choices[0].token_ids == most_probable
    assert client.generate(greedy(SHORT, 2, speculation={"enabled": False})).usage.completion_tokens == 2


def test_generate_prints_what_the_server_answers(served: Served) -> None:
    words = ["--address", served.address, "--token-file", served.token_file, "--max-tokens", 6, "--json", "Hello"]
    command = [sys.executable, "-m", "cluster.cli", "generate", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["prompt_tokens"] > 5  # the chat template's included
    assert 0 < answer["completion_tokens"] <= 6
    assert answer["speculation"] is None


def test_events_are_logged_as_json_with_the_requests_id(served: Served, client: Client) -> None:
    client.generate(greedy(SHORT, 2, request_id="looked-for"))
    lines = [json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{")]
    ended = [line for line in lines if line.get("request_id") == "looked-for" and line["event"] == "call ended"]
    assert [(line["status"], line["completion_tokens"], line["replica"]) for line in ended] == [("OK", 2, "replica-0")]


def test_a_killed_engine_is_unavailable_at_once_and_ends_the_server(served: Served, client: Client) -> None:
    with grpc.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=DEADLINE_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        stream = client.stream(greedy(SHORT, 400), timeout_s=DEADLINE_S)
        next(stream)
        children = psutil.Process(served.process.pid).children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        killed = time.monotonic()
        engine.kill()
        with pytest.raises(GenerationError) as failure:
            list(stream)
        assert failure.value.status is grpc.StatusCode.UNAVAILABLE
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert time.monotonic() - killed < 5
        watch.cancel()
    assert served.process.wait(DEADLINE_S) == 1
    log = served.log.read_text()
    assert "the engine has died" in log
    assert "Exception ignored" not in log
