"""`dspark-cluster plan` on saved facts: what it prints, its JSON, and its exit codes. No model is built here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cluster.cli import app
from cluster.contract.contract import KVContract
from cluster.contract.facts import ConfigWrite, SideFacts
from tests.unit.test_contract_pairs import backend, cannot, format, group, qwen3_8b, side

GIB = 1 << 30
COLUMNS = 100

REWRITE = ConfigWrite(
    field="cache_config.cache_dtype",
    old="auto",
    new="fp8_ds_mla",
    writer="DeepseekV4FlashMLAAttention",
    location="vllm/models/deepseek_v4/attention.py:119",
)
OWN = ConfigWrite(
    field="draft_model_config.hf_config.draft_vocab_size",
    old="unset",
    new="151936",
    writer="Qwen3DSparkForCausalLM",
    location="vllm/model_executor/models/qwen3_dspark.py:241",
)


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def write(*sides: SideFacts) -> list[str]:
        arguments = []
        for i, facts in enumerate(sides):
            path = tmp_path / f"{i}.json"
            path.write_text(facts.to_json())
            arguments += ["--facts", str(path)]
        return arguments

    return write


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(app, ["plan", *arguments])


def test_the_contract_is_printed_within_100_columns(save: Any) -> None:
    target, draft = qwen3_8b()
    result = plan(*save(target, replace(draft, constructor_writes=(REWRITE, OWN))))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= COLUMNS
    lines = result.stdout.splitlines()
    assert any(line.split()[:5] == ["target", "full", "36", "FLASH_ATTN", "bfloat16"] for line in lines)
    assert any(line.split()[:6] == ["draft", "draft", "full", "5", "FLASH_ATTN", "bfloat16"] for line in lines)
    assert "none: the draft's groups have the target's backend and cache dtype" in result.stdout
    assert "TRITON_ATTN: non-causal attention not supported" in result.stdout


def test_a_write_that_would_have_reached_the_target_is_told_from_one_that_would_not(save: Any) -> None:
    target, draft = qwen3_8b()
    lines = plan(*save(target, replace(draft, constructor_writes=(REWRITE, OWN)))).stdout.splitlines()
    shared = next(i for i, line in enumerate(lines) if "cache_config.cache_dtype: auto → fp8_ds_mla" in line)
    assert "changes the target's config too" in lines[shared]
    assert "by DeepseekV4FlashMLAAttention" in lines[shared + 1]
    assert any("draft_vocab_size" in line and "no effect" in line for line in lines)


def test_a_deviation_comes_with_its_reason(save: Any) -> None:
    target = side("target", group("full", "target", backend("FLASHINFER")))
    needs = group(
        "draft",
        "draft",
        backend("FLASH_ATTN"),
        infeasible=(cannot("FLASHINFER", "non-causal attention not supported"),),
    )
    arguments = save(target, side("draft", needs))
    result = plan(*arguments)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "draft attention_backend FLASHINFER FLASH_ATTN" in text
    assert "non-causal attention not supported" in text
    refused = plan(*arguments, "--strict")
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert len(refused.stderr.strip().splitlines()) == 1
    assert refused.stderr.startswith("dspark-cluster: attention_backend is FLASHINFER on the target")


def test_json_holds_a_contract_that_reads_back_and_the_memory_plan(save: Any) -> None:
    result = plan(*save(*qwen3_8b()), "--json", "--gpu-memory", "80")
    document = json.loads(result.stdout)
    assert document.keys() == {"schema", "contract", "memory", "refusal"}
    assert (document["schema"], document["refusal"]) == ("dspark-cluster/plan/1", None)
    contract = KVContract.from_json(json.dumps(document["contract"]))
    assert contract.digest == document["contract"]["digest"]
    assert document["memory"]["tokens_gained"] == (
        document["memory"]["separate_tokens"] - document["memory"]["colocated_tokens"]
    )
    assert "without it" in document["memory"]["summary"]


def test_json_of_a_refusal_names_both_sides(save: Any) -> None:
    target, draft = qwen3_8b()
    result = plan(*save(target, replace(draft, vllm_version="0.31.0")), "--json")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert (document["contract"], document["memory"]) == (None, None)
    assert document["refusal"]["field"] == "vllm_version"
    assert (document["refusal"]["target"], document["refusal"]["draft"]) == ("0.32.0", "0.31.0")
    assert document["refusal"]["reason"]
    assert document["refusal"]["remedy"]


def test_the_memory_plan_is_for_the_gpu_that_is_named(save: Any) -> None:
    target, draft = qwen3_8b()
    arguments = save(target, draft)
    small, large = (
        json.loads(plan(*arguments, "--json", "--gpu-memory", size).stdout)["memory"] for size in ("40", "80")
    )
    for memory, gib in ((small, 40), (large, 80)):
        per_token = 36 * 4096
        left = int(gib * GIB * 0.92) - target.weight_bytes - draft.projection_bytes
        assert memory["separate_tokens"] == pytest.approx(left // per_token, rel=0.001)
        left -= draft.weight_bytes - draft.shared_weight_bytes - draft.projection_bytes
        assert memory["colocated_tokens"] == pytest.approx(left // (41 * 4096), rel=0.001)


def test_a_gpu_that_cannot_hold_the_weights_is_refused(save: Any) -> None:
    result = plan(*save(*qwen3_8b()), "--gpu-memory", "8")
    assert result.exit_code == 2
    assert result.stderr.startswith("dspark-cluster: kv_cache_bytes is 0 bytes, 0 blocks on the target")


def test_a_policy_word_that_no_backend_has_is_refused(save: Any) -> None:
    result = plan(*save(*qwen3_8b()), "--attention-backend", "FLASHMLA")
    assert result.exit_code == 2
    assert "FLASHMLA for draft" in result.stderr
    dtype = plan(*save(*qwen3_8b()), "--kv-cache-dtype", "fp8")
    assert dtype.exit_code == 0
    assert "asked for by kv_cache_dtype=fp8" in " ".join(dtype.stdout.split())


def test_saved_facts_are_those_that_were_read(save: Any, tmp_path: Path) -> None:
    target, draft = qwen3_8b()
    folder = tmp_path / "saved"
    assert plan(*save(target, draft), "--save-facts", str(folder)).exit_code == 0
    assert SideFacts.from_json((folder / "target.json").read_bytes()) == target
    assert SideFacts.from_json((folder / "draft.json").read_bytes()) == draft


def test_one_side_without_models_to_probe(save: Any) -> None:
    result = plan(*save(qwen3_8b()[0]))
    assert result.exit_code == 2
    assert "no facts of the draft" in result.stderr
    assert "name --target and --draft, or --facts for both sides" in result.stderr


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "dspark-cluster/facts/9"}'])
def test_a_file_that_holds_no_facts(content: str, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(content)
    result = plan("--facts", str(tmp_path / "facts.json"))
    assert result.exit_code == 2
    assert "facts.json" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_two_files_of_one_side(save: Any) -> None:
    target, _ = qwen3_8b()
    result = plan(*save(target, target))
    assert result.exit_code == 2
    assert "it is the second one of a target" in result.stderr


def test_a_block_of_formats_shows_both_word_and_dtype(save: Any) -> None:
    target = side("target", group("full", "target", backend("FLASH_ATTN", format("fp8", 2048))))
    draft = side("draft", group("draft", "draft", backend("FLASH_ATTN", format("fp8", 2048))))
    assert plan(*save(target, draft)).stdout.count("fp8 (uint8)") == 2
