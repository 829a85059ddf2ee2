"""The GPU bench's Gemma 4 with its assistant, by the same configs, narrower: an engine takes them and is timed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.bench.dummy_pair import dummy_settings
from cluster.bench.gpu_arm import Workload, run_batch
from cluster.engine.in_process import InProcessEngine
from cluster.engine.settings import EngineSettings

# The vocabulary stays: prompts are drawn from it.
NARROW = {
    "hidden_size": 64,
    "backbone_hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 32,
}
LAYERS = 6


def test_the_assistant_drafts_and_its_rounds_are_timed(
    tmp_path: Path, start_engine: Callable[[EngineSettings], InProcessEngine]
) -> None:
    settings = dummy_settings(
        tmp_path,
        shape="gemma4-12b-mtp",
        with_draft=True,
        acceptance_length=3.0,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    for file in tmp_path.rglob("config.json"):
        file.write_text(json.dumps(narrow(json.loads(file.read_text()))))
    workload = Workload(
        shape="gemma4-12b-mtp",
        prompt_tokens=(10, 70),
        new_tokens=13,
        max_batch=2,
        acceptance_length=3.0,
        kv_cache_bytes=1,
        attention_backend=None,
        with_parts=False,
    )
    engine = start_engine(settings)
    for length in workload.prompt_tokens:
        run = run_batch(engine, workload, None, batch=2, prompt_tokens=length, seed=1)
        assert run.rounds is not None
        assert run.acceptance_length is not None
        assert 1 < run.acceptance_length <= 5
        assert 2 * 13 / run.tokens_per_second > run.ms_per_round / 1e3 > 0
        assert run.bytes_per_round is None


def narrow(config: dict[str, Any]) -> dict[str, Any]:
    """The same keys, smaller sizes."""
    smaller = {key: NARROW.get(key, value) for key, value in config.items()}
    if "text_config" in config:
        smaller["text_config"] = narrow(config["text_config"])
    if config.get("num_hidden_layers", 0) > LAYERS:
        smaller |= {"num_hidden_layers": LAYERS, "layer_types": config["layer_types"][:LAYERS]}
    return smaller
