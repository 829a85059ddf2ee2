"""The commands as a user runs them, each in a process of its own."""

import json
import subprocess
import sys

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


def test_generate_streams_the_text_and_ends_with_its_figures(pair: TinyPair) -> None:
    arguments = ["--target", pair.target, "--draft", pair.draft, "--no-chat", "--max-tokens", 20]
    shown = run("cluster.cli", "generate", *arguments, "-", stdin="Hello")
    parsed = json.loads(run("cluster.cli", "generate", *arguments, "--json", "Hello").stdout)
    assert shown.stdout.removesuffix("\n") == parsed["text"]
    summary = shown.stderr.strip().splitlines()[-1]
    speculation = parsed["speculation"]
    assert summary.startswith(f"{len(parsed['token_ids'])} tokens in ")
    assert f"acceptance length {speculation['acceptance_length']:.2f} over {speculation['rounds']} rounds" in summary
    assert len(speculation["acceptance_rate_by_position"]) == pair.num_speculative_tokens
    assert parsed["completion_tokens"] <= 20
    # Nothing but the text and one line of figures: no log of vLLM, no warning of torch.
    assert shown.stderr.strip().splitlines() == [summary]


def test_the_step_bench_tells_the_forward_pass_from_the_rest(pair: TinyPair) -> None:
    figures = json.loads(run("cluster.bench.cpu_step", "--target", pair.target, "--num-tokens", 8, "--json").stdout)
    assert figures["steps"] == 7
    assert 0 < figures["outside_forward_ms"] < figures["step_ms"]
    assert {"name", "stand_in", "launches", "seconds"} == set(figures["kernels"][0])
    assert any(kernel["name"] == "gumbel_sample" and kernel["stand_in"] for kernel in figures["kernels"])
