"""A whole cluster in real Ray: two pairs, targets on one node, drafts on another with gloo between them, and what the
commands do to it.

The tests stand in the order of the cluster's life: up, requests, an actor's death, down.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from actors.bench_faults.processes import family
from actors.ports import free_port
from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import segments_of
from cluster.client import Client, Request, Sampling, Stopping, TokenPrompt
from cluster.config import load_config
from cluster.engine.build import engine_settings
from cluster.engine.in_process import GenerationRequest, InProcessEngine
from tests.checkpoints import make_pair
from tests.cluster.waiting import eventually

DEADLINE_S = 400
"""For `up` on a machine that does other things: seven processes import vLLM."""
SHORT_DEADLINE_S = 90

PROMPTS = [tuple(range(start, start + length)) for start, length in ((7, 4), (40, 33), (100, 90), (60, 12))]
NUM_TOKENS = 24
NUM_STREAMS = 32
TARGETS, DRAFTS = ("target-0", "target-1"), ("draft-0", "draft-1")
NAMESPACE = "dspark-cluster-test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    config: Path
    ray: str
    address: str
    said: str
    """What `up` wrote to standard error."""


def run(*words: object, deadline_s: float = SHORT_DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "actors.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    pair = make_pair("qwen3-dspark-agreeing", folder)
    file = folder / "cluster.yaml"
    plain = {
        "model": {"target": str(pair.target), "draft": str(pair.draft)},
        "engine": {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 16},
        "pools": {
            "replicas": len(TARGETS),
            "hosts": "different",
            "target": {"labels": {"pool": "target"}},
            "draft": {"labels": {"pool": "draft"}, "num_cpus": 0.5},
        },
        "channel": {"stall_limit_s": None},  # a machine that does other things holds up a draft for longer
        "gateway": {"port": 0, "metrics_port": free_port("127.0.0.1")},
        "ray": {"namespace": NAMESPACE},
    }
    file.write_text(yaml.safe_dump(plain))
    return file


@pytest.fixture(scope="module")
def running(config: Path, two_nodes: Cluster) -> Iterator[Running]:
    result = run("up", config, "--address", two_nodes.address, deadline_s=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    yield Running(config=config, ray=two_nodes.address, address=result.stdout.strip(), said=result.stderr)
    run("down", "--address", two_nodes.address, "--namespace", NAMESPACE)


@pytest.fixture(scope="module")
def expected(config: Path) -> list[tuple[int, ...]]:
    """What the target alone answers."""
    settings = engine_settings(load_config(config))
    requests = [
        GenerationRequest(prompt_token_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS
    ]
    with InProcessEngine(replace(settings, speculation=None)) as engine:
        return [completion.token_ids for completion in engine.generate(requests)]


def asked(prompt: tuple[int, ...]) -> Request:
    return Request(
        prompt=TokenPrompt(token_ids=prompt),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=NUM_TOKENS, ignore_eos=True),
    )


def prompt_of(index: int) -> tuple[int, ...]:
    return PROMPTS[index % len(PROMPTS)]


def is_cancelled(index: int) -> bool:
    """One in four, and each prompt once among them."""
    return (index + index // 4) % 4 == 3


def status(running: Running) -> dict[str, Any]:
    result = run("status", "--address", running.ray, "--namespace", NAMESPACE, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def process_of(name: str) -> int:
    actor = ray.get_actor(name, namespace=NAMESPACE)
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def test_up_tells_each_step_and_ends_with_the_address(running: Running) -> None:
    for step in ("draft-0: loading", "target-1: ready", "pair 1: epoch 1, contract ", "dspark, K = 4, 16 blocks"):
        assert step in running.said
    assert f"dspark-cluster generate --address {running.address}" in running.said
    assert running.address.startswith("127.0.0.1:")


def test_streams_are_the_targets_own(running: Running, expected: list[tuple[int, ...]]) -> None:
    """All at once, through both pairs, and while one in four is cancelled in mid-stream."""

    def stream(index: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        with closing(client.stream(asked(prompt_of(index)))) as responses:  # type: ignore[type-var]
            for response in responses:
                tokens += response.choices[0].token_ids
                if is_cancelled(index):
                    break
        return tokens

    with Client(running.address) as client, ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(stream, range(NUM_STREAMS)))
    for index, tokens in enumerate(answers):
        whole = expected[index % len(PROMPTS)]
        assert tokens == (whole[: len(tokens)] if is_cancelled(index) else whole)
        assert 0 < len(tokens) < NUM_TOKENS or not is_cancelled(index)


def test_status_tells_what_runs(running: Running) -> None:
    now = status(running)
    assert now["schema"] == "dspark-cluster/status/1"
    assert now["gateway"]["address"] == running.address
    targets = now["targets"].values()
    assert [target["ready"] for target in targets] == [True, True]
    assert now["requests"] == sum(target["requests"] for target in targets) >= NUM_STREAMS  # more, if some were moved
    assert min(target["requests"] for target in targets) > 0
    assert [target["running"] for target in targets] == [0, 0]
    assert now["acceptance"]["acceptance_length"] > 1
    for index, pair in enumerate(now["pairs"]):
        assert pair["epoch"] == 1
        assert f"pair {index}: epoch 1, contract {pair['digest'][:16]}" in running.said
        assert pair["contract"]["digest"] == pair["digest"]
        assert {(member["name"], member["activity"]) for member in pair["members"]} == {
            (TARGETS[index], "ready"),
            (DRAFTS[index], "ready"),
        }
    shown = run("status", "--address", running.ray, "--namespace", NAMESPACE).stdout
    assert all(name in shown for name in TARGETS + DRAFTS)
    assert f"requests: {now['requests']}; acceptance length" in shown


def test_the_gateways_page_has_the_replicas_figures(running: Running) -> None:
    port = load_config(running.config).gateway.metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SHORT_DEADLINE_S) as page:
        lines = page.read().decode().splitlines()
    figures = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    for name in TARGETS:
        label = f'replica="{name}"'
        (accepted,) = (
            figure
            for key, figure in figures.items()
            if key.startswith("vllm:spec_decode_num_accepted_tokens_total{") and label in key
        )
        assert accepted > 0
        assert figures[f"dspark_rounds_total{{{label}}}"] > 0
        assert figures[f'dspark_round_seconds_total{{part="draft",{label}}}'] > 0
        assert figures[f"dspark_pairing_epoch{{{label}}}"] == 1
        assert figures[f"dspark_draft_lost{{{label}}}"] == 0


def write_batch(file: Path, repeats: int) -> None:
    """The prompts so many times, as a batch's input."""
    options = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    lines = [{"token_ids": prompt, **options} for prompt in PROMPTS * repeats]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def answers_in(file: Path) -> dict[int, tuple[int, ...]]:
    """Whole lines of a batch's output, by index; none is there twice."""
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    lines = [json.loads(line) for line in whole.splitlines()]
    answers = {line["index"]: tuple(line["choices"][0]["token_ids"]) for line in lines}
    assert len(answers) == len(lines)
    return answers


def test_a_batch_finds_the_gateway(running: Running, expected: list[tuple[int, ...]], tmp_path: Path) -> None:
    write_batch(tmp_path / "prompts.jsonl", 1)
    files = ("--input", tmp_path / "prompts.jsonl", "--output", tmp_path / "out.jsonl")
    result = run("batch", "--ray-address", running.ray, "--namespace", NAMESPACE, *files)
    assert result.returncode == 0, result.stderr
    assert answers_in(tmp_path / "out.jsonl") == dict(enumerate(expected))
    assert "acceptance length" in result.stderr
    elsewhere = run("batch", "--ray-address", running.ray, "--namespace", "empty", *files[:3], tmp_path / "other.jsonl")
    assert elsewhere.returncode == 2
    assert "none serves in Ray namespace empty" in elsewhere.stderr


def test_a_batch_as_a_job_that_is_stopped_goes_on_in_the_next(
    running: Running, two_nodes: Cluster, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    repeats = 6
    write_batch(tmp_path / "prompts.jsonl", repeats)
    output = tmp_path / "out.jsonl"
    entrypoint = [sys.executable, "-m", "actors.cli", "batch", "--namespace", NAMESPACE, "--concurrency", "2"]
    entrypoint += ["--input", "prompts.jsonl", "--output", str(output)]

    def job(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", verb]
        command += ["--address", f"http://{two_nodes.head_node.webui_url}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=SHORT_DEADLINE_S, check=False)

    def submit(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return job("submit", "--submission-id", name, "--working-dir", str(tmp_path), *words, "--", *entrypoint)

    submitted = submit("stopped", "--no-wait")
    assert submitted.returncode == 0, submitted.stderr
    eventually(lambda: len(answers_in(output)) > 1, deadline_s=SHORT_DEADLINE_S)
    assert job("stop", "stopped").returncode == 0
    before = len(answers_in(output))
    assert before < len(PROMPTS) * repeats
    ended = submit("resumed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{before} of {len(PROMPTS) * repeats} lines have their answers from before" in ended.stdout
    assert answers_in(output) == dict(enumerate(expected * repeats))
    assert run("status", "--address", running.ray, "--namespace", NAMESPACE).returncode == 0, "the cluster goes on"


def test_a_second_cluster_needs_another_namespace(running: Running) -> None:
    result = run("up", running.config, "--address", running.ray)
    assert result.returncode == 2
    names = ", ".join(("coordinator", *DRAFTS, "gateway", *TARGETS))
    assert f"Ray namespace {NAMESPACE}: there is a cluster in it ({names})" in result.stderr


def test_an_engines_process_ends_with_its_actor(running: Running, expected: list[tuple[int, ...]]) -> None:
    """And the other replica answers."""
    replica = process_of("target-0")
    processes = family(replica)
    assert len(processes) > 1, "vLLM runs its engine in a process of its own"
    os.kill(replica, signal.SIGKILL)
    eventually(lambda: not any(each.exists() for each in processes), deadline_s=SHORT_DEADLINE_S)
    with Client(running.address) as client:
        eventually(lambda: client.cluster_info()[0].state == "dead", deadline_s=SHORT_DEADLINE_S)
        answers = [client.generate(asked(prompt)).choices[0].token_ids for prompt in PROMPTS]
    assert answers == expected
    assert status(running)["gateway"]["serving"]


def test_a_replica_is_drained_by_its_name(running: Running) -> None:
    where = ("--address", running.ray, "--namespace", NAMESPACE)
    result = run("drain", "target-0", *where)
    assert result.returncode == 0, result.stderr
    assert "target-0 is drained: 0 requests ended there, 0 were moved" in result.stderr
    assert status(running)["gateway"]["drained"] == ["target-0"]
    unknown = run("drain", "target-7", *where)
    assert unknown.returncode == 2
    assert "replica target-7: there are target-0, target-1; name one of these" in unknown.stderr


def test_down_leaves_nothing(running: Running) -> None:
    draft = ProcessIdentity.of(process_of(DRAFTS[0]))
    result = run("down", "--address", running.ray, "--namespace", NAMESPACE)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stderr for name in ("stopped coordinator", *DRAFTS, "gateway", TARGETS[1]))
    assert not [each for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    eventually(lambda: not draft.exists(), deadline_s=SHORT_DEADLINE_S)
    assert not segments_of([draft])
    again = run("status", "--address", running.ray, "--namespace", NAMESPACE)
    assert again.returncode == 2
    assert "none runs in this Ray namespace" in again.stderr
