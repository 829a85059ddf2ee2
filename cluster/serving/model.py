"""What is served, as far as a request can be wrong about it."""

from dataclasses import dataclass

from cluster.serving.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDraft:
    """The draft; `num_speculative_tokens` are drafted each round (K)."""

    model: str
    method: str
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The target. Token ids are below `vocab_size`; prompt and output together have at most `max_model_len` tokens.

    `default_sampling` has a value in every scalar but `seed`; `default_max_tokens` None means what the context holds.
    """

    name: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    has_chat_template: bool
    default_sampling: Sampling
    default_max_tokens: int | None
    schedules_by_priority: bool
    vllm_version: str
    draft: ServedDraft | None = None

    @property
    def unimplemented_fields(self) -> tuple[str, ...]:
        """Paths of the fields that this engine can't honour. vLLM 0.32's rejection sampler knows neither min_p nor
        logit_bias."""
        speculating = () if self.draft is None else ("sampling.min_p", "sampling.logit_bias")
        return speculating if self.schedules_by_priority else (*speculating, "priority")
