"""From a user's text to the target's token ids, before any weight is loaded."""

from typing import Any

from cluster.errors import UserError
from cluster.models.folder import ModelFolder


def encode_prompt(target: ModelFolder, text: str, *, chat: bool | None, context_length: int | None) -> tuple[int, ...]:
    """The prompt's token ids.

    `chat` True wraps the text as a user's message by the model's chat template, False takes it as it is, None does
    what the model is made for. Raises UserError for an empty prompt, one that leaves no room for an answer in
    `context_length` tokens, and a template that isn't there.
    """
    if not text.strip():
        raise UserError("the prompt is empty", "there is nothing to continue", "give some text")
    tokenizer = _tokenizer(target)
    if chat is None:
        chat = tokenizer.chat_template is not None
    if chat and tokenizer.chat_template is None:
        raise UserError(f"target {target.name}", "it has no chat template", "use --no-chat to send the text as it is")
    if chat:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
    else:
        encoded = tokenizer(text)
    token_ids = tuple(int(token) for token in encoded["input_ids"])
    if context_length is not None and len(token_ids) >= context_length:
        raise UserError(
            f"the prompt has {len(token_ids):,} tokens",
            f"the context holds {context_length:,}, the answer included",
            "shorten the prompt",
        )
    return token_ids


def _tokenizer(target: ModelFolder) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target.path)
    except (OSError, ValueError) as error:
        why = f"its tokenizer can't be read ({' '.join(str(error).split())})"
        raise UserError(f"target {target.name}", why, "download the model again") from error
