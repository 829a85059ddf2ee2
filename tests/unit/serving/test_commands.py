"""`generate --address` and the end of `serve`, as a user sees them."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client import Client, FinishReason
from cluster.serving.service import SERVICE_NAME
from tests.serving.requests import greedy
from tests.unit.serving.conftest import DEADLINE_S, NOT_SERVING, NOT_SERVING_BAR_S, SERVING, Served


def generate(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(command: str, *arguments: object) -> str:
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("dspark-cluster: ")
    assert len(line.splitlines()) == 1
    return line


def test_generate_asks_the_server_and_prints_its_answer(start: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    address = start(token="secret").server.address
    there = ("--address", address, "--token-file", tmp_path / "token", "--max-tokens", 3)
    assert generate(*there, "Hello") == "aaa\n"
    answer = json.loads(generate(*there, "--seed", 7, "--json", "Hello"))
    assert (answer["text"], answer["finish_reason"], answer["prompt_tokens"], answer["seed"]) == ("aaa", "length", 5, 7)


def test_what_a_server_refuses_is_one_line_with_a_remedy(start: Callable[..., Served]) -> None:
    served = start()
    line = refused("generate", "--address", served.server.address, "--max-tokens", 9999, "Hello")
    assert "INVALID_ARGUMENT, stopping.max_tokens: 9,999; the context holds 256" in line
    assert "change the request" in line
    chat = refused("generate", "--address", served.server.address, "--chat", "Hello")
    assert "FAILED_PRECONDITION, prompt.chat: scripted has no chat template" in chat
    guarded = start(token="secret").server.address
    assert "--token-file" in refused("generate", "--address", guarded, "Hello")
    assert "UNAVAILABLE" in refused("generate", "--address", "127.0.0.1:1", "Hello")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--address", "nowhere"), "it is not HOST:PORT"),
        (("--address", "127.0.0.1:99999"), "it is not HOST:PORT"),
        (("--address", "127.0.0.1:1", "--draft", "x"), "--draft beside --address"),
        (("--address", "127.0.0.1:1", "--tls-key", "x"), "only one is given"),
        (("--address", "127.0.0.1:1", "--tls-ca", "absent"), "it can't be read"),
        (("--address", "127.0.0.1:1", "--token-file", "absent"), "it can't be read"),
        (("--target", "x", "--tls"), "--tls beside --target"),
        ((), "no model"),
    ],
)
def test_options_that_cannot_be_are_said(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("generate", *arguments, "Hello")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seed", -1, "--seed -1: a request holds 0 to 18,446,744,073,709,551,615; choose one of these"),
        ("--seed", 1 << 64, "--seed 18446744073709551616: a request holds 0 to 18,446,744,073,709,551,615"),
        ("--max-tokens", 5_000_000_000, "--max-tokens 5000000000: a request holds 0 to 4,294,967,295; choose one"),
    ],
)
def test_a_number_that_no_request_can_hold_is_said(
    start: Callable[..., Served], option: str, value: int, said: str
) -> None:
    assert said in refused("generate", "--address", start().server.address, option, value, "Hello")


def test_a_prompt_that_isnt_utf_8_is_said(start: Callable[..., Served]) -> None:
    there = ["generate", "--address", start().server.address]
    assert "the prompt: it isn't UTF-8" in refused(*there, "\udcff")  # an argument's byte 0xff
    result = CliRunner().invoke(app, there, input=b"\xff")
    assert result.exit_code == 2, result.output
    assert "the prompt: it isn't UTF-8" in result.stderr


def test_tls_options_of_serve_come_together_and_are_read_before_the_model() -> None:
    assert "--tls-certificate is missing" in refused("serve", "--target", "x", "--tls-key", "x")
    absent = ("--tls-key", "absent", "--tls-certificate", "absent")
    assert "TLS certificate absent: it can't be read" in refused("serve", "--target", "x", *absent)


def test_a_signal_ends_serving_when_what_runs_has_ended() -> None:
    words = [sys.executable, "-m", "tests.serving.scripted_server"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving scripted on 127.0.0.1:")
        address = line.split(" on ")[1].split(";")[0]
        with Client(address) as client, grpc.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert next(watch).status == SERVING
            stream = client.stream(greedy(max_tokens=40), timeout_s=DEADLINE_S)
            parts = [next(stream)]
            signalled = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            took_s = time.monotonic() - signalled
            print(f"not ready {1e3 * took_s:.0f} ms after SIGTERM")
            assert took_s < NOT_SERVING_BAR_S
            watch.cancel()
            parts += list(stream)
        assert len(parts) == 40
        assert parts[-1].choices[0].finish_reason is FinishReason.LENGTH
        assert process.wait(DEADLINE_S) == 0
