"""A batch's requests held against the server's own rules before the first is sent, by the code that it checks with."""

from dataclasses import fields
from typing import Final

from cluster.batch.lines import BatchInput
from cluster.client import ModelInfo, Request, TokenPrompt
from cluster.serving.errors import RequestError
from cluster.serving.limits import Limits
from cluster.serving.model import ServedDraft, ServedModel
from cluster.serving.validate import check_lengths, validate
from cluster.serving.wire import encode_request

_LIMITS: Final = frozenset(each.name for each in fields(Limits))


def check_input(batch: BatchInput, info: ModelInfo) -> None:
    """Raise UserError for the first line that this server would refuse.

    How many tokens a text has only the server knows: one that is too long is refused when it is run.
    """
    model = _served_model(info)
    limits = Limits(**{name: most for name, most in info.limits.items() if name in _LIMITS})
    for line in batch.lines:
        message = encode_request(line.request)
        try:
            if message.ByteSize() > limits.max_message_bytes:
                raise batch.wrong(
                    line, f"{message.ByteSize():,} bytes; a request may have {limits.max_message_bytes:,}"
                )
            validate(message, model, limits)
            _check_tokens(line.request, model)
        except RequestError as error:
            raise batch.wrong(line, str(error)) from error


def _check_tokens(request: Request, model: ServedModel) -> None:
    if isinstance(request.prompt, TokenPrompt):
        tokens = len(request.prompt.token_ids)
        check_lengths(request, min(tokens, request.truncate_prompt_tokens or tokens), model)


def _served_model(info: ModelInfo) -> ServedModel:
    """What the server knows of its model, as far as it tells."""
    return ServedModel(
        name=info.model,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_logprobs=info.limits.get("max_logprobs", 0),  # 0 isn't listed
        has_chat_template=info.has_chat_template,
        default_sampling=info.default_sampling,
        default_max_tokens=None,
        schedules_by_priority="priority" not in info.unimplemented_fields,
        vllm_version=info.vllm_version,
        draft=None
        if info.draft is None
        else ServedDraft(
            model=info.draft.model,
            method=info.draft.method,
            num_speculative_tokens=info.draft.num_speculative_tokens,
        ),
    )
