"""The probe on real configs: its facts are those that a real engine lives by.

vLLM is imported once for all probes that succeed, and once more for those that can't.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.contract.facts import SideFacts
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from cluster.contract.probe import ProbeRequest, probe
from cluster.contract.verify import verify_allocation
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.draft import Speculation
from cluster.models.folder import open_model
from tests.checkpoints import TinyPair, make_pair
from tests.split.engines import colocated_engine, tensors_of
from tests.split.processes import Child

FAMILIES = ("qwen3-dspark", "gemma4-dspark", "qwen3-dflash", "qwen3-draft-model")
DEEPSEEK = "deepseek-v4-dspark"
NUM_BLOCKS = 32


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    folder = tmp_path_factory.mktemp("pairs")
    return {name: make_pair(name, folder / name) for name in (*FAMILIES, DEEPSEEK)}


def settings_of(pair: TinyPair) -> EngineSettings:
    draft = open_model(str(pair.draft), role="draft", weights=False)
    return EngineSettings(
        target=open_model(str(pair.target), role="target", weights=False),
        speculation=Speculation(draft=draft, method=pair.method, num_speculative_tokens=pair.num_speculative_tokens),  # type: ignore[arg-type]
        max_model_len=512,
        max_num_seqs=4,
        num_gpu_blocks=NUM_BLOCKS,
    )


@pytest.fixture(scope="module")
def facts(pairs: dict[str, TinyPair]) -> dict[str, SideFacts]:
    """By `pair target` and `pair draft`."""
    requests = {
        f"{name} {role}": ProbeRequest(role=role, model=name, engine_args=settings_of(pairs[name]).to_engine_args())
        for name in pairs
        for role in ("target", "draft")
        if (name, role) != (DEEPSEEK, "draft")  # vLLM has none for a CPU
    }
    return dict(zip(requests, probe(*requests.values()), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_real_engine_allocates_what_the_probes_contract_says(
    name: str, pairs: dict[str, TinyPair], facts: dict[str, SideFacts]
) -> None:
    """Target and draft in one engine: its layers' tensors are those of the two pools."""
    contract = negotiate(facts[f"{name} target"], facts[f"{name} draft"], Policy(strict=True))
    assert contract.num_blocks == NUM_BLOCKS
    allocated = tensors_of(Child(colocated_engine, settings_of(pairs[name]).to_engine_args()).report())
    for role in ("target", "draft"):
        layers = {layer for group in contract.groups_of(role) for layer in group.layers}  # type: ignore[arg-type]
        assert layers <= allocated.keys()
        verify_allocation(contract, role, {layer: allocated[layer] for layer in layers})  # type: ignore[arg-type]


def test_the_targets_weights_are_those_of_its_checkpoint(
    pairs: dict[str, TinyPair], facts: dict[str, SideFacts]
) -> None:
    for name in ("qwen3-dspark", "qwen3-draft-model"):
        file = pairs[name].target / "model.safetensors"
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert facts[f"{name} target"].weight_bytes == file.stat().st_size - header, name


def test_a_draft_borrows_what_its_checkpoint_lacks(facts: dict[str, SideFacts]) -> None:
    """Qwen3's DSpark and DFlash drafts take the target's embedding and head, Gemma 4's has its own."""
    embedding_and_head = 2 * 512 * 64 * 4
    assert facts["qwen3-dspark draft"].shared_weight_bytes == embedding_and_head
    assert facts["qwen3-dflash draft"].shared_weight_bytes == embedding_and_head
    assert facts["gemma4-dspark draft"].shared_weight_bytes == 0
    assert facts["qwen3-dspark draft"].projection_bytes == 3 * 64 * 64 * 4


def test_drafts_that_attend_both_ways_say_so(facts: dict[str, SideFacts]) -> None:
    non_causal = {key for key, side in facts.items() if any(group.use_non_causal for group in side.groups)}
    assert non_causal == {"qwen3-dspark draft", "gemma4-dspark draft", "qwen3-dflash draft"}


def test_a_backend_that_vllm_asks_for_in_vain_is_reported(facts: dict[str, SideFacts]) -> None:
    """vLLM's own hook for Gemma 4 configures TRITON_ATTN, and its CPU platform takes CPU_ATTN all the same."""
    for group in facts["gemma4-dspark target"].groups:
        assert [backend.name for backend in group.backends] == ["CPU_ATTN"]
        assert [other.name for other in group.infeasible] == ["TRITON_ATTN"]


def test_the_constructor_behind_vllm_52288_is_seen_at_it(facts: dict[str, SideFacts]) -> None:
    target = facts[f"{DEEPSEEK} target"]
    (write,) = target.constructor_writes
    assert (write.field, write.old, write.new) == ("cache_config.cache_dtype", "auto", "fp8_ds_mla")
    assert write.writer == "DeepseekV4CPUAttention"
    assert write.location.startswith("vllm/models/deepseek_v4/attention.py:")
    rows = {
        backend.formats[0].row_bytes
        for group in target.groups
        for backend in group.backends
        if backend.formats[0].cache_dtype == "fp8_ds_mla"
    }
    assert rows == {584}


def test_a_draft_that_this_platform_lacks_is_refused_in_one_line(pairs: dict[str, TinyPair]) -> None:
    arguments = settings_of(pairs[DEEPSEEK]).to_engine_args()
    with pytest.raises(UserError, match=r"DSpark\) is not implemented on CPU") as refused:
        probe(ProbeRequest(role="draft", model="DeepSeek-V4", engine_args=arguments))
    assert "\n" not in str(refused.value)
    assert "--facts" in refused.value.remedy


def test_a_probe_that_takes_too_long_is_given_up(pairs: dict[str, TinyPair]) -> None:
    arguments = settings_of(pairs["qwen3-dspark"]).to_engine_args()
    with pytest.raises(UserError, match="it has not ended after 0 s"):
        probe(ProbeRequest(role="target", model="Qwen3", engine_args=arguments), timeout_s=0.01)


def plan(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["plan", *map(str, arguments), "--gpu-memory", "1"])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_plan_answers_from_two_folders_without_weights(pairs: dict[str, TinyPair], tmp_path: Path) -> None:
    pair = pairs["qwen3-dspark"]
    for source, folder in ((pair.target, tmp_path / "target"), (pair.draft, tmp_path / "draft")):
        folder.mkdir()
        for file in ("config.json", "tokenizer.json"):
            (folder / file).write_bytes((source / file).read_bytes())
    text = plan("--target", tmp_path / "target", "--draft", tmp_path / "draft", "--max-model-len", 512)
    assert "draft full_attention full_attention 2 CPU_ATTN float32 128 1,024 LBHNC" in text
    assert "by Qwen3DSparkForCausalLM" in text
    assert "tokens more without it" in text


def test_plan_of_a_hybrid_target_mirrors_its_full_attention(facts: dict[str, SideFacts], tmp_path: Path) -> None:
    arguments = []
    for role in ("target", "draft"):
        (tmp_path / role).write_text(facts[f"gemma4-dspark {role}"].to_json())
        arguments += ["--facts", tmp_path / role]
    text = plan(*arguments)
    assert "target sliding_window 2 CPU_ATTN float32 128 1,024 LBHNC" in text
    assert "draft full_attention full_attention 2 CPU_ATTN float32 128 1,024 LBHNC" in text
    assert "TRITON_ATTN: this platform takes CPU_ATTN" in text
