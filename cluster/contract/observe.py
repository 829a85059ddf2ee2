"""What is watched while a side's constructors run, in a probe and in a worker alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.config import VllmConfig

from cluster.contract.facts import ConfigWrite
from cluster.contract.seal import covered, record_writes
from cluster.contract.selections import Selection, record_selections


@dataclass(slots=True)
class Observed:
    """Complete once the `observe` block has ended."""

    writes: tuple[ConfigWrite, ...] = ()
    selections: dict[object, Selection] = field(default_factory=dict)


@contextmanager
def observe(vllm_config: VllmConfig) -> Iterator[Observed]:
    """See who writes to the configs that a target and its draft share in one process, and what layers ask for."""
    observed = Observed()
    with record_writes(_shared_configs(vllm_config)) as writes, record_selections() as selections:
        yield observed
    # A leading underscore is a config's own memory of something it has computed.
    observed.writes = tuple(write for write in writes if not write.field.rpartition(".")[2].startswith("_"))
    observed.selections = selections


def _shared_configs(vllm_config: VllmConfig) -> dict[str, object]:
    configs = covered(vllm_config)
    models = {"model_config": vllm_config.model_config}
    if vllm_config.speculative_config is not None:
        models["draft_model_config"] = vllm_config.speculative_config.draft_model_config
    for name, model in models.items():
        nested = {name: model, f"{name}.hf_config": model.hf_config, f"{name}.hf_text_config": model.hf_text_config}
        taken = {id(config) for config in configs.values()}
        for key, config in nested.items():
            if id(config) not in taken:
                configs[key] = config
                taken.add(id(config))
    return configs
