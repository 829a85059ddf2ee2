"""vLLM's Gemma 4 DSpark draft, beside a text-only target too.

vLLM 0.32 names the draft's layers from 0 (`vllm/model_executor/models/gemma4_dspark.py`), and so are a text-only
target's: with both in one process the second is refused as a duplicate. A target with other inputs escapes that,
because its layers are named `language_model...`.
"""

from vllm.config import VllmConfig
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM


class NamedGemma4DSparkForCausalLM(Gemma4DSparkForCausalLM):
    """The same model under a prefix of its own; names of weights don't depend on it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix or "draft")
