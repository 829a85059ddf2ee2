"""The GPU bench's arithmetic and its refusals, with arms that answer from a script."""

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from cluster.bench.dummy_pair import (
    Shape,
    acceptance_length_of,
    dummy_settings,
    logits_bytes,
    parse_shape,
    write_pair,
)
from cluster.bench.gpu_arm import ArmFacts, ArmRun, DecodingRounds, Workload
from cluster.bench.gpu_arms import COLOCATED, Arm, Figures, measure, on_one_gpu, on_ranks, on_two_gpus, split, together
from cluster.bench.gpu_report import GpuReport, kv_tokens_in
from cluster.bench.mps import multi_process_service
from cluster.errors import UserError
from cluster.speculation.rounds import RoundTimes
from cluster.speculation.stream_marks import StreamMarks

ONE_GPU = ("plain", "colocated", "separate, cuda_ipc, one GPU")


class ScriptedArm:
    """Each run is a token a second faster than the one before."""

    num_gpus = 1

    def __init__(self, name: str, journal: list[tuple[str, int]], *, fails_at: int | None = None) -> None:
        self.name = name
        self._journal = journal
        self._fails_at = fails_at
        self._runs = 0

    def run(self, *, batch: int, prompt_tokens: int, seed: int) -> ArmRun:
        assert prompt_tokens == 128
        self._runs += 1
        if self._runs == self._fails_at:
            raise UserError(f"the arm {self.name}", "its process has ended", "look at what it wrote last")
        self._journal.append((self.name, seed))
        return _ran(tokens_per_second=100.0 * batch + self._runs, ms_per_round=10.0 + self._runs)


def _ran(*, tokens_per_second: float, **figures: Any) -> ArmRun:
    others = {"ms_per_round": 8.0, "bytes_per_round": None, "rounds": None, "acceptance_length": None}
    return ArmRun(tokens_per_second=tokens_per_second, **(others | figures))


def test_arms_take_turns_with_the_same_prompts_and_the_warm_up_is_not_counted() -> None:
    journal: list[tuple[str, int]] = []
    arms = [ScriptedArm(name, journal) for name in ONE_GPU]
    figures = measure(arms, batch=2, prompt_tokens=128, repeats=3)  # type: ignore[arg-type]
    rounds = [journal[i : i + 3] for i in range(0, 12, 3)]
    assert [len({seed for _, seed in one}) for one in rounds] == [1, 1, 1, 1]
    assert len({seed for _, seed in journal}) == 4
    assert [one[0][0] for one in rounds] == [*ONE_GPU, "plain"]
    assert [(one.arm, one.batch, one.prompt_tokens) for one in figures] == [(name, 2, 128) for name in ONE_GPU]
    assert [one.tokens_per_second for one in figures] == [[202.0, 203.0, 204.0]] * 3
    assert [one.ms_per_round for one in figures] == [[12.0, 13.0, 14.0]] * 3
    assert figures[0].median == 203.0


def test_there_is_no_comparison_when_an_arm_fails() -> None:
    journal: list[tuple[str, int]] = []
    arms = [ScriptedArm(name, journal, fails_at=3 if name == ONE_GPU[2] else None) for name in ONE_GPU]
    with pytest.raises(UserError, match="the arm separate, cuda_ipc"):
        measure(arms, batch=1, prompt_tokens=128, repeats=3)  # type: ignore[arg-type]


class ScriptedEngine:
    def __init__(self, run: ArmRun) -> None:
        self.begun: list[tuple[int, int]] = []
        self._run = run

    def begin(self, *, batch: int, prompt_tokens: int, seed: int) -> None:
        assert prompt_tokens == 1024
        self.begun.append((batch, seed))

    def result(self) -> ArmRun:
        return self._run


def test_two_replicas_share_a_batch_and_their_speeds_add_up() -> None:
    engines = [
        ScriptedEngine(_ran(tokens_per_second=100.0, ms_per_round=9.0, rounds=30, acceptance_length=5.0)),
        ScriptedEngine(_ran(tokens_per_second=50.0, ms_per_round=7.0, rounds=10, acceptance_length=3.0)),
    ]
    arm = Arm("two", engines, 2)  # type: ignore[arg-type]
    expected = _ran(tokens_per_second=150.0, ms_per_round=8.0, rounds=40, acceptance_length=4.5)
    assert arm.run(batch=9, prompt_tokens=1024, seed=1) == expected
    assert [engine.begun[0][0] for engine in engines] == [5, 4]
    assert engines[0].begun[0][1] != engines[1].begun[0][1]
    assert arm.run(batch=1, prompt_tokens=1024, seed=2).tokens_per_second == 100.0
    assert len(engines[1].begun) == 1
    assert split(8, 2) == [4, 4]


def test_runs_without_drafts_have_no_acceptance_together() -> None:
    assert together([_ran(tokens_per_second=1.0)] * 2) == _ran(tokens_per_second=2.0)


def test_a_round_is_timed_while_all_requests_decode() -> None:
    times = RoundTimes(rounds=5, request_bytes=9000)  # of the prompts
    now = 0.0
    decoding = DecodingRounds(2, times, clock=lambda: now)
    for advanced in (0, 1, 2, 2, 0, 2, 2, 1):
        now += 0.5 if advanced < 2 else 0.01
        if advanced:
            times.rounds += 1
            times.request_bytes += 1000 if advanced < 2 else 300
            times.reply_bytes += 20
        decoding.add(advanced)
    assert decoding.ms_per_round == pytest.approx(1e3 * (3 * 0.01 + 0.5) / 3)
    assert decoding.bytes_per_round == 320


def test_a_batch_whose_requests_never_decode_together_is_refused() -> None:
    decoding = DecodingRounds(2, None)
    for advanced in (1, 2, 1):
        decoding.add(advanced)
    with pytest.raises(UserError, match="raise --new-tokens"):
        _ = decoding.ms_per_round
    assert decoding.bytes_per_round is None


def test_on_two_gpus_every_separate_draft_has_one_of_its_own() -> None:
    arms = {arm.name: arm for arm in on_two_gpus(["cuda_ipc", "nccl"], ("6", "7"), with_shared=False, with_mps=False)}
    assert list(arms) == ["plain", "colocated", "two colocated", "separate, cuda_ipc", "separate, nccl"]
    assert [arm.num_gpus for arm in arms.values()] == [1, 1, 2, 2, 2]
    assert [plan.gpus for plan in arms["two colocated"].plans] == [("6",), ("7",)]
    assert arms["two colocated"].plans[0] == arms["colocated"].plans[0]  # one engine, in both
    for name in ("separate, cuda_ipc", "separate, nccl"):
        (plan,) = arms[name].plans
        ours, theirs = (each["CUDA_VISIBLE_DEVICES"] for each in (plan.environment, plan.draft_environment))
        assert sorted([ours, theirs]) == ["6,7", "7,6"]


def test_a_pair_that_shares_a_gpu_is_an_arm_without_mps_and_one_with_it() -> None:
    arms = on_one_gpu(["cuda_ipc"], with_mps=True)
    assert [arm.name for arm in arms] == [
        "plain",
        "colocated",
        "separate, cuda_ipc, one GPU",
        "separate, cuda_ipc, one GPU, MPS",
    ]
    assert [plan.with_mps for arm in arms for plan in arm.plans] == [False, False, False, True]
    assert [plan.environment for arm in arms for plan in arm.plans] == [{}] * 4
    shared = on_two_gpus(["cuda_ipc", "nccl"], ("6", "7"), with_shared=True, with_mps=False)[-1]
    assert (shared.name, shared.num_gpus) == ("separate, cuda_ipc, one GPU", 1)
    assert shared.plans[0].environment == shared.plans[0].draft_environment == {"CUDA_VISIBLE_DEVICES": "7"}


def test_a_target_of_two_ranks_has_its_draft_on_the_last_ones_gpu_or_on_a_third() -> None:
    arms = {arm.name: arm for arm in on_ranks(["cuda_ipc"], ("5", "6", "7", "8"), 2)}
    assert {name: arm.num_gpus for name, arm in arms.items()} == {
        "plain": 2,
        "colocated": 2,
        "separate, cuda_ipc, on the last rank's GPU": 2,
        "separate, cuda_ipc": 3,
    }
    plans = [plan for arm in arms.values() for plan in arm.plans]
    assert {plan.tensor_parallel_size for plan in plans} == {2}
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["5,6", "5,6", "5,6", "5,6,7"]
    assert [plan.draft_environment["CUDA_VISIBLE_DEVICES"] for plan in plans[2:]] == ["6,5", "7,6,5"]
    assert "separate, cuda_ipc" not in [arm.name for arm in on_ranks(["cuda_ipc"], ("5", "6"), 2)]


CONTROL = """#!/bin/sh
echo "$1 $(cat)" >> "$CUDA_MPS_LOG_DIRECTORY/../said"
[ "$1" = "${REFUSED:-nothing}" ] && echo "no GPU" >&2 && exit 1
exit 0
"""


@pytest.fixture
def mps_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control program that starts nothing; returns the file of what it was told."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "said"


def test_an_mps_daemon_is_stopped_when_its_block_fails(mps_control: Path) -> None:
    def fail() -> None:
        with multi_process_service() as variables:
            assert set(variables) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert mps_control.read_text().splitlines() == ["-d ", " quit"]


def test_an_mps_daemon_that_does_not_start_is_an_error(mps_control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "-d")
    with pytest.raises(UserError, match="no GPU"), multi_process_service():
        pass
    assert mps_control.read_text().splitlines() == ["-d "]


def test_mps_without_its_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no nvidia-cuda-mps-control"), multi_process_service():
        pass


FACTS = {
    COLOCATED: ArmFacts(weight_bytes=18 << 30, kv_tokens=1000, allocated_bytes=0, attention_backends=["TRITON_ATTN"]),
    ONE_GPU[2]: ArmFacts(
        weight_bytes=16 << 30, kv_tokens=1100, allocated_bytes=0, attention_backends=["TRITON_ATTN"], kv_sharing="map"
    ),
}


def test_the_price_of_a_round_is_beyond_colocated_with_the_same_prompts() -> None:
    workload = Workload(
        shape="gemma4-12b-mtp",
        prompt_tokens=(1024, 8192),
        new_tokens=64,
        max_batch=1,
        acceptance_length=3.0,
        kv_cache_bytes=10 << 30,
        attention_backend="TRITON_ATTN",
        with_parts=False,
    )
    report = GpuReport(workload, FACTS)
    for length, arm, ms in ((1024, COLOCATED, 8), (1024, ONE_GPU[2], 9), (8192, COLOCATED, 12), (8192, ONE_GPU[2], 15)):
        report.figures.append(
            Figures(
                prompt_tokens=length,
                batch=1,
                arm=arm,
                num_gpus=1,
                tokens_per_second=[300.0] * 3,
                ms_per_round=[ms - 0.5, ms, ms + 3.0],
                bytes_per_round=None,
                acceptance_length=3.0,
                parts_us={},
            )
        )
    document = json.loads(json.dumps(report.document()))
    assert [run["price_ms_per_round"] for run in document["runs"]] == [0, 1, 0, 3]
    assert document["workload"]["attention_backend"] == "TRITON_ATTN"
    assert document["engines"][ONE_GPU[2]]["kv_sharing"] == "map"
    shown = Console(width=200)
    with shown.capture() as capture:
        shown.print(*report.tables())
    assert "+3.00" in capture.get()


def test_freed_weights_are_room_for_tokens() -> None:
    colocated, separate = FACTS[COLOCATED], FACTS[ONE_GPU[2]]
    assert kv_tokens_in(colocated, colocated, 10 << 30) == 1000
    assert kv_tokens_in(colocated, separate, 10 << 30) == 1320


@pytest.mark.parametrize(
    ("shape", "layers", "vocabulary", "method", "tokens", "drafted_at_once"),
    [
        ("qwen3-8b", 36, 151936, "dspark", 7, 7),
        ("gemma4-12b", 48, 262144, "dspark", 7, 7),
        ("gemma4-12b-mtp", 48, 262144, "mtp", 4, 1),
    ],
)
def test_a_dummy_pair_is_configs_alone(
    tmp_path: Path, shape: Shape, layers: int, vocabulary: int, method: str, tokens: int, drafted_at_once: int
) -> None:
    settings = dummy_settings(tmp_path, shape=shape, with_draft=True, acceptance_length=4.5, max_num_seqs=8)
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["config.json"] * 2
    arguments = settings.to_engine_args()
    assert json.loads((Path(arguments["model"]) / "config.json").read_text())["num_hidden_layers"] == layers
    assert (arguments["load_format"], arguments["skip_tokenizer_init"]) == ("dummy", True)
    speculation = arguments["speculative_config"]
    assert (speculation["method"], speculation["num_speculative_tokens"]) == (method, tokens)
    assert speculation["synthetic_acceptance_length"] == 4.5
    assert "attention_config" not in arguments
    assert "attention_backend" not in speculation
    sizes: dict[str, Any] = {"compilation_mode": 0, "stream_interval": 8}
    plain = dummy_settings(tmp_path, shape=shape, with_draft=False, acceptance_length=4.5, **sizes).to_engine_args()
    assert "speculative_config" not in plain
    assert (plain["compilation_config"], plain["stream_interval"]) == ({"mode": 0}, 8)
    assert logits_bytes(shape, 2) == (2 * (tokens + 1) * vocabulary * 4, 2 * drafted_at_once * vocabulary * 4)


def test_an_attention_backend_is_that_of_every_arm(tmp_path: Path) -> None:
    for with_draft in (False, True):
        arguments = dummy_settings(
            tmp_path,
            shape="gemma4-12b",
            with_draft=with_draft,
            acceptance_length=3,
            attention_backend="TRITON_ATTN",
        ).to_engine_args()
        assert arguments["attention_config"] == {"backend": "TRITON_ATTN"}
        drafts = arguments.get("speculative_config", {}).get("attention_backend")
        assert drafts == ("TRITON_ATTN" if with_draft else None)


def test_the_largest_round_has_a_cuda_graph(tmp_path: Path) -> None:
    for max_num_seqs, captured in ((64, None), (128, {"max_cudagraph_capture_size": 1024})):
        settings = dummy_settings(
            tmp_path, shape="qwen3-8b", with_draft=True, acceptance_length=5.5, max_num_seqs=max_num_seqs
        )
        assert settings.to_engine_args().get("compilation_config") == captured


def test_more_tokens_a_round_than_the_draft_makes_are_refused() -> None:
    assert acceptance_length_of("qwen3-8b", None) == 5.5
    assert acceptance_length_of("gemma4-12b-mtp", 5) == 5
    with pytest.raises(UserError, match="5 tokens a round at most"):
        acceptance_length_of("gemma4-12b-mtp", 5.5)


def test_a_dummy_pair_that_is_served_has_a_tokenizer(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path / "pair", parse_shape("qwen3-8b", "--dummy qwen3-8b"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode([5, 151935]) == "5 151935"
    assert json.loads((draft / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]
    with pytest.raises(UserError, match="choose one of qwen3-8b, gemma4-12b"):
        parse_shape("qwen3-9b", "--dummy qwen3-9b")


class Event:
    """Of a stream that passes one each microsecond."""

    def __init__(self, clock: Iterator[int]) -> None:
        self._clock = clock

    def record(self) -> None:
        self.time = next(self._clock)

    def elapsed_time(self, end: "Event") -> float:
        return (end.time - self.time) / 1e3


def test_the_parts_of_a_round_are_between_its_marks() -> None:
    clock = itertools.count()
    marks = StreamMarks(lambda: Event(clock))  # type: ignore[arg-type,return-value]
    for _ in range(3):
        marks.mark("begun")
        marks.mark("encoded")
        next(clock)
        next(clock)
        marks.mark("replied")
        marks.mark("taken")
    marks.mark("begun")  # and broken off
    assert marks.take_microseconds() == pytest.approx({"encode": 1, "wait": 3, "take": 1, "step": 6})
    assert marks.take_microseconds() == {}
