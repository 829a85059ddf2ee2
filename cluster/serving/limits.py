"""The most that a request may ask for. Each is checked before the engine sees the request."""

from dataclasses import dataclass, fields
from typing import Final

from cluster.contract.errors import DocumentError

MiB = 1 << 20

_LARGEST: Final = (1 << 31) - 1
"""That gRPC takes for the size of a message; a server tells its clients of the others in 32 bits, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Counts and sizes. vLLM's worker has fixed rows for some of them, and ends the whole engine where they overflow:
    128 stop tokens (the model's own included), 1,024 biased and 1,024 allowed tokens, 1,024 tokens of bad words, a
    signed 64-bit seed (`vllm/v1/worker/gpu/sample`).

    A cluster's config file that doesn't give `max_running` has as many as all of its engines together run at once:
    `engine.max_num_seqs` times `pools.replicas`."""

    max_message_bytes: int = 4 * MiB
    max_response_bytes: int = 64 * MiB
    max_prompt_characters: int = 1 * MiB
    max_chat_messages: int = 1024
    max_n: int = 16
    max_stop_strings: int = 16
    max_stop_string_length: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 64
    max_bad_word_length: int = 128
    max_structured_output_bytes: int = 64 * 1024
    max_json_nesting: int = 32
    max_regex_length: int = 4096
    max_choice_texts: int = 1024
    max_cache_salt_length: int = 128
    max_batch_requests: int = 256
    max_abort_ids: int = 1024

    max_running: int = 16
    """Choices in the engine, or in all of a cluster's engines, at once; more wait."""
    max_queued: int = 256
    """Choices that wait; more are refused."""

    def __post_init__(self) -> None:
        for each in fields(self):
            least, value = 0 if each.name == "max_queued" else 1, getattr(self, each.name)
            if not least <= value <= _LARGEST:
                raise DocumentError(each.name, str(value), f"from {least} to {_LARGEST:,}")
