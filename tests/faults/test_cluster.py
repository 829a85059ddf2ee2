"""A cluster of two replicas whose processes are killed under load: no request fails, and what was killed comes back.

The tests share the cluster, and leave it as whole as they found it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import pytest
import yaml

from actors.bench_faults import process_of
from actors.names import COORDINATOR, GATEWAY
from actors.session import session
from cluster.client import Client, Request, Sampling, Stopping, TokenPrompt
from cluster.client.errors import GenerationError
from tests.checkpoints import make_pair
from tests.cluster.waiting import eventually

DEADLINE_S = 500
"""For two pairs to start, and for one to come back, on a machine that does other things."""

NAMESPACE = "dspark-cluster-faults"
PROMPTS = [tuple(range(start, start + 12)) for start in range(5, 125, 20)]
NUM_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    address: str
    expected: list[tuple[int, ...]]
    """What is answered while nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    longest_gap_s: float


def run(*words: object, deadline_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "actors.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("cluster")
    pair = make_pair("qwen3-dspark-agreeing", folder)
    plain = {
        "model": {"target": str(pair.target), "draft": str(pair.draft)},
        "engine": {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 16},
        "pools": {"replicas": 2, "target": {"num_cpus": 0.1}, "draft": {"num_cpus": 0.1}},
        "gateway": {"port": 0},
        "ray": {"namespace": NAMESPACE},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(plain))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DSPARK_CACHE", str(folder / "cache"))  # a Ray of its own
        environment.delenv("RAY_ADDRESS", raising=False)
        result = run("up", file)
        assert result.returncode == 0, result.stderr
        try:
            with session(None, NAMESPACE):
                address = result.stdout.strip()
                yield Served(address=address, expected=[answer.tokens for answer in ask(address)])
        finally:
            run("down", "--namespace", NAMESPACE)


def ask(address: str) -> list[Answer]:
    """Each prompt, all together."""

    def one(prompt: tuple[int, ...]) -> Answer:
        request = Request(
            prompt=TokenPrompt(token_ids=prompt),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        tokens: list[int] = []
        times: list[float] = []
        for response in client.stream(request):
            tokens += response.choices[0].token_ids
            times.append(time.monotonic())
        return Answer(tokens=tuple(tokens), longest_gap_s=max(later - one for one, later in pairwise(times)))

    with Client(address) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


def ask_while_killing(served: Served, *names: str) -> list[Answer]:
    processes = [process_of(name) for name in names]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, served.address)
        eventually(lambda: running(served) > 0 or answers.done(), deadline_s=DEADLINE_S)
        for process in processes:
            os.kill(process, signal.SIGKILL)
        return answers.result(DEADLINE_S)


def running(served: Served) -> int:
    with Client(served.address) as client:
        return sum(replica.running for replica in client.cluster_info())


def states(served: Served) -> dict[str, str]:
    with Client(served.address) as client:
        return {replica.name: replica.state for replica in client.cluster_info()}


def test_a_killed_draft_costs_no_request(served: Served) -> None:
    answers = ask_while_killing(served, "draft-0")
    assert [answer.tokens for answer in answers] == served.expected

    def is_back() -> bool:
        pairs = json.loads(run("status", "--namespace", NAMESPACE, "--json").stdout)["pairs"]
        return all(member["activity"] == "ready" for pair in pairs for member in pair["members"]) and all(
            len(pair["members"]) == 2 for pair in pairs
        )

    eventually(is_back, deadline_s=DEADLINE_S, otherwise="the draft never came back")
    assert [answer.tokens for answer in ask(served.address)] == served.expected


def test_a_killed_replicas_requests_go_on_with_the_other(served: Served) -> None:
    before = states(served)
    answers = ask_while_killing(served, "target-0")
    assert [answer.tokens for answer in answers] == served.expected, "no token is lost or repeated"
    print(f"longest gap of a stream: {max(answer.longest_gap_s for answer in answers):.2f} s")
    begun = time.monotonic()
    eventually(lambda: states(served) == before, deadline_s=DEADLINE_S, otherwise="the replica never came back")
    print(f"the replica was back {time.monotonic() - begun:.0f} s after the answers")


def test_serving_resumes_at_the_same_address_without_coordinator_and_gateway(served: Served) -> None:
    for name in (COORDINATOR, GATEWAY):
        os.kill(process_of(name), signal.SIGKILL)

    def is_served() -> bool:
        try:
            return [answer.tokens for answer in ask(served.address)] == served.expected
        except GenerationError:
            return False

    eventually(is_served, deadline_s=DEADLINE_S, otherwise="the gateway never came back")


def test_a_drained_replica_runs_nothing(served: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, served.address)
        eventually(lambda: running(served) > 0 or answers.done(), deadline_s=DEADLINE_S)
        result = run("drain", "target-1", "--grace", "0.2", "--namespace", NAMESPACE)
        assert result.returncode == 0, result.stderr
        assert "target-1 is drained" in result.stderr
        assert [answer.tokens for answer in answers.result(DEADLINE_S)] == served.expected
    assert states(served)["target-1"] != states(served)["target-0"]
    unknown = run("drain", "target-7", "--namespace", NAMESPACE)
    assert unknown.returncode == 2
    assert "target-7" in unknown.stderr
