"""The GPU bench's arithmetic and its refusals, with arms that answer from a script."""

import json
from pathlib import Path

import pytest

from cluster.bench.dummy_pair import NUM_SPECULATIVE_TOKENS, dummy_settings
from cluster.bench.gpu import Throughput, measure
from cluster.bench.gpu_arm import ARMS, ArmName, ArmRun
from cluster.errors import UserError


class ScriptedArm:
    """Each run is a token a second faster than the one before."""

    def __init__(self, name: ArmName, journal: list[tuple[ArmName, int]], *, fails_at: int | None = None) -> None:
        self.name = name
        self._journal = journal
        self._fails_at = fails_at
        self._runs = 0

    def run(self, batch: int, seed: int) -> ArmRun:
        self._runs += 1
        if self._runs == self._fails_at:
            raise UserError(f"the arm {self.name}", "its process has ended", "look at what it wrote last")
        self._journal.append((self.name, seed))
        return ArmRun(tokens_per_second=100.0 * batch + self._runs, rounds=None, acceptance_length=None)


def test_arms_take_turns_with_the_same_prompts_and_the_warm_up_is_not_counted() -> None:
    journal: list[tuple[ArmName, int]] = []
    arms = [ScriptedArm(name, journal) for name in ARMS]
    figures = measure(arms, batch=2, repeats=3)  # type: ignore[arg-type]
    rounds = [journal[i : i + 3] for i in range(0, 12, 3)]
    assert [len({seed for _, seed in one}) for one in rounds] == [1, 1, 1, 1]
    assert len({seed for _, seed in journal}) == 4
    assert [one[0][0] for one in rounds] == ["plain", "colocated", "separate", "plain"]
    expected = [202.0, 203.0, 204.0]
    assert figures == [
        Throughput(batch=2, arm=name, tokens_per_second=expected, acceptance_length=None) for name in ARMS
    ]
    assert figures[0].median == 203.0


def test_there_is_no_comparison_when_an_arm_fails() -> None:
    journal: list[tuple[ArmName, int]] = []
    arms = [ScriptedArm(name, journal, fails_at=3 if name == "separate" else None) for name in ARMS]
    with pytest.raises(UserError, match="the arm separate"):
        measure(arms, batch=1, repeats=3)  # type: ignore[arg-type]


def test_a_dummy_pair_is_configs_alone(tmp_path: Path) -> None:
    settings = dummy_settings(tmp_path, with_draft=True, acceptance_length=5.5, max_num_seqs=8)
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["config.json"] * 2
    arguments = settings.to_engine_args()
    assert json.loads((Path(arguments["model"]) / "config.json").read_text())["num_hidden_layers"] == 36
    assert (arguments["load_format"], arguments["skip_tokenizer_init"]) == ("dummy", True)
    speculation = arguments["speculative_config"]
    assert (speculation["method"], speculation["num_speculative_tokens"]) == ("dspark", NUM_SPECULATIVE_TOKENS)
    assert speculation["synthetic_acceptance_length"] == 5.5
    plain = dummy_settings(tmp_path, with_draft=False, acceptance_length=5.5)
    assert "speculative_config" not in plain.to_engine_args()
