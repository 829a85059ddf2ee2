"""A request in vLLM's words, and vLLM's refusals in ours."""

from typing import Any

import vllm.envs
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from cluster.engine import request_drafts
from cluster.serving.errors import RequestError, invalid
from cluster.serving.types import Request, Sampling, SpeculationOptions, StructuredOutput

_PATHS: dict[str, str] = {
    **{name: f"sampling.{name}" for name in Sampling.__slots__},
    "max_tokens": "stopping.max_tokens",
    "stop_token_ids": "stopping.stop_token_ids",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
}
"""Our paths by vLLM's names."""


def sampling_params(request: Request, defaults: Sampling, max_tokens: int) -> SamplingParams:
    """vLLM's parameters; what the request leaves unset is the model's default."""
    sampling, stopping, output = request.sampling, request.stopping, request.output

    def chosen(name: str) -> Any:
        value = getattr(sampling, name)
        return getattr(defaults, name) if value is None else value

    return SamplingParams(
        n=chosen("n"),
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=chosen("top_k"),
        min_p=chosen("min_p"),
        presence_penalty=chosen("presence_penalty"),
        frequency_penalty=chosen("frequency_penalty"),
        repetition_penalty=chosen("repetition_penalty"),
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words=list(sampling.bad_words),
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens or 0,
        stop=list(stopping.stop_strings),
        stop_token_ids=list(stopping.stop_token_ids),
        include_stop_str_in_output=bool(stopping.include_stop_string),
        ignore_eos=bool(stopping.ignore_eos),
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        skip_special_tokens=output.skip_special_tokens is not False,
        spaces_between_special_tokens=output.spaces_between_special_tokens is not False,
        structured_outputs=_structured(request.structured_output),
        extra_args=_draft_limit(request.speculation),
        output_kind=RequestOutputKind.DELTA,
    )


def _draft_limit(options: SpeculationOptions) -> dict[str, int] | None:
    most = 0 if options.enabled is False else options.max_tokens
    return None if most is None else {request_drafts.MAX_DRAFT_TOKENS: most}


def _structured(constraint: StructuredOutput | None) -> StructuredOutputsParams | None:
    match constraint:
        case None:
            return None
        case StructuredOutput(kind="choice", texts=texts):
            return StructuredOutputsParams(choice=list(texts))
        case StructuredOutput(kind="json_object"):
            return StructuredOutputsParams(json_object=True)
        case StructuredOutput(kind="json_schema", text=text):
            return StructuredOutputsParams(json=text)
    return StructuredOutputsParams(**{constraint.kind: constraint.text})


def check_bad_words(request: Request, tokenizer: Any) -> None:
    """Raise RequestError for too many: vLLM's worker has room for so many of their tokens, and dies of one more."""
    words = request.sampling.bad_words
    if not words:
        return
    parameters = SamplingParams(bad_words=list(words))
    try:
        parameters.update_from_tokenizer(tokenizer)
    except VLLMValidationError as error:
        raise refused(request, error) from error
    tokens, most = sum(map(len, parameters.bad_words_token_ids or ())), vllm.envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > most:
        raise invalid("sampling.bad_words", f"{tokens:,} tokens; at most {most:,}")


def refused(request: Request, error: VLLMClientError) -> RequestError:
    """vLLM's refusal, with our path of the field that it names."""
    named: str | None = getattr(error, "parameter", None)
    if named is not None:
        field = _PATHS.get(named, named)
    else:
        constraint = request.structured_output
        field = "" if constraint is None else f"structured_output.{constraint.kind}"
    return invalid(field, " ".join(str(error).split()))
