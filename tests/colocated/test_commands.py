"""The commands as a user runs them, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import TinyPair, make_pair

DEADLINE_S = 300  # imports of a minute on a busy machine, and more than one of them


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair("qwen3-dspark-agreeing", tmp_path_factory.mktemp("pair"))


def run(*command: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *map(str, command)]
    result = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def answer(pair: TinyPair) -> dict[str, Any]:
    return json.loads(run("cluster.cli", "generate", *arguments(pair), "--json", "Hello").stdout)


def arguments(pair: TinyPair) -> list[object]:
    return ["--target", pair.target, "--draft", pair.draft, "--no-chat", "--max-tokens", 20]


def test_generate_streams_the_text_and_ends_with_its_figures(pair: TinyPair, answer: dict[str, Any]) -> None:
    shown = run("cluster.cli", "generate", *arguments(pair), "-", stdin="Hello")
    assert shown.stdout.removesuffix("\n") == answer["text"]
    summary = shown.stderr.strip().splitlines()[-1]
    speculation = answer["speculation"]
    assert summary.startswith(f"{len(answer['token_ids'])} tokens in ")
    assert f"acceptance length {speculation['acceptance_length']:.2f} over {speculation['rounds']} rounds" in summary
    assert len(speculation["acceptance_rate_by_position"]) == pair.num_speculative_tokens
    assert answer["completion_tokens"] <= 20
    assert answer["rounds"] is None
    # Nothing but the text and one line of figures: no log of vLLM, no warning of torch.
    assert shown.stderr.strip().splitlines() == [summary]


def test_generate_with_a_separate_draft_gives_the_same_and_tells_what_crossed(
    pair: TinyPair, answer: dict[str, Any], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    words = ["--placement", "separate", "--json", "--profile", trace, "Hello"]
    shown = run("cluster.cli", "generate", *arguments(pair), *words)
    separate = json.loads(shown.stdout)
    assert separate["token_ids"] == answer["token_ids"]
    assert separate["speculation"] == answer["speculation"]
    # The prompt is a round too, and its draft the first that is verified.
    assert separate["rounds"]["rounds"] >= answer["speculation"]["rounds"]
    assert separate["rounds"]["request_bytes"] > separate["rounds"]["reply_bytes"] > 0

    events = json.loads(trace.read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    rounds = [event for event in events if event["name"] == "dspark: round" and event["pid"] == processes["target"]]
    drafts = [event for event in events if event["name"] == "dspark: draft" and event["pid"] == processes["draft"]]
    assert len(rounds) == len(drafts) == separate["rounds"]["rounds"]
    for round, draft in zip(rounds, drafts, strict=True):  # by one clock
        assert round["ts"] < draft["ts"] < draft["ts"] + draft["dur"] < round["ts"] + round["dur"]


def test_the_step_bench_tells_the_forward_pass_from_the_rest(pair: TinyPair) -> None:
    figures = json.loads(run("cluster.bench.cpu_step", "--target", pair.target, "--num-tokens", 8, "--json").stdout)
    assert figures["steps"] == 7
    assert 0 < figures["outside_forward_ms"] < figures["step_ms"]
    assert {"name", "stand_in", "launches", "seconds"} == set(figures["kernels"][0])
    assert any(kernel["name"] == "gumbel_sample" and kernel["stand_in"] for kernel in figures["kernels"])
