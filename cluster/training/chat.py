"""A user's texts as conversations by the target's chat template."""

from collections.abc import Sequence
from typing import Any

from cluster.errors import UserError
from cluster.models.folder import ModelFolder

_PLACEHOLDER = "\N{WHITE SQUARE}"


class Chat:
    """The target's tokenizer and template. Raises UserError where there is no template."""

    def __init__(self, target: ModelFolder) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(target.path)
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"target {target.name}",
                "it has no chat template, by which prompts are put to it",
                "use the target's instruction-tuned variant",
            )
        turn = self._tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}], tokenize=False)
        self._before_turn = str(turn).partition(_PLACEHOLDER)[0]

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids that ask for an answer to each text."""
        if not texts:
            return []
        conversations = [[{"role": "user", "content": text}] for text in texts]
        encoded = self._tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)
        return [tuple(ids) for ids in encoded["input_ids"]]

    def begin(self, opening: str) -> tuple[int, ...]:
        """The token ids of a user's turn that isn't over."""
        return tuple(self._tokenizer(self._before_turn + opening, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
