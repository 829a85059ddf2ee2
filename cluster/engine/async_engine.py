"""vLLM's AsyncLLM as the service's engine: a process of its own runs the model, this one tokenizes and detokenizes."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import grpc
import vllm.envs
from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from cluster.engine import round_figures
from cluster.engine.async_outputs import DeltaReader
from cluster.engine.parent import children_die_with_this_process
from cluster.engine.settings import EngineSettings
from cluster.engine.vllm_errors import EngineStartError, refused_settings
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.errors import RequestError, invalid
from cluster.serving.model import ServedDraft, ServedModel
from cluster.serving.types import ChatPrompt, Request, Sampling, StructuredOutput, TextPrompt, TokenPrompt


class AsyncEngine:
    """A `GenerationEngine`. It starts on construction, which blocks until the model is loaded: from a running event
    loop, construct it in a thread.

    `more_engine_args` are vLLM's own, for parts of this project inside the engine. Raises UserError for what vLLM
    refuses in the settings, and where the engine's process doesn't come up.
    """

    def __init__(self, settings: EngineSettings, *, more_engine_args: Mapping[str, Any] | None = None) -> None:
        arguments = settings.to_engine_args() | {
            **(more_engine_args or {}),
            "served_model_name": settings.target.name,
            # One backend for all: vLLM takes the one that the first request needs, and fails later ones that need
            # another.
            "structured_outputs_config": {"backend": "xgrammar"},
        }
        if settings.speculation is not None:
            arguments["per_request_spec_decode_metrics"] = round_figures.LEVEL
        self._usage = _KvCacheUsage()
        try:
            with refused_settings(), children_die_with_this_process():
                self._engine = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**arguments), stat_loggers=[lambda *_: self._usage]
                )
        except RuntimeError as error:
            raise EngineStartError(
                "the engine did not start", str(error), "its log says why: --debug shows it"
            ) from error
        self._model = _served_model(settings, self._engine)
        self._closed = False

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def dead(self) -> bool:
        return bool(self._engine.errored)

    @property
    def kv_cache_usage(self) -> float:
        return self._usage.share

    @property
    def vllm_engine(self) -> Any:
        """vLLM's own engine, for tests that look inside."""
        return self._engine

    async def prepare(self, request: Request) -> tuple[int, ...]:
        return await asyncio.to_thread(self._prepare, request)

    async def generate(
        self, request_id: str, request: Request, prompt_token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[EngineDelta, None]:
        prompt = TokensPrompt(prompt_token_ids=list(prompt_token_ids))
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        reader = DeltaReader(request_id, request, self._engine.output_processor)
        try:
            parameters = _sampling_params(request, self._model.default_sampling, max_tokens)
            # Closed here and now, not when it is collected: closing ends the request in the engine.
            outputs = self._engine.generate(prompt, parameters, request_id, priority=request.priority or 0)
            try:
                async for output in outputs:
                    yield reader.read(output)
            finally:
                await outputs.aclose()
        except VLLMClientError as error:
            raise _refused(request, error) from error
        except VLLMEngineDeadError as error:
            raise EngineDeadError("the engine has died") from error
        except EngineGenerateError as error:
            raise RequestError(grpc.StatusCode.INTERNAL, "", "the engine failed this request") from error

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self._engine.abort(list(request_ids))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._engine.shutdown)

    def _prepare(self, request: Request) -> tuple[int, ...]:
        tokenizer = self._engine.renderer.get_tokenizer()
        _check_bad_words(request, tokenizer)
        match request.prompt:
            case TokenPrompt(token_ids=token_ids):
                tokens = list(token_ids)
            case TextPrompt(text=text):
                tokens = tokenizer.encode(text)
            case ChatPrompt() as chat:
                tokens = self._render(chat)
        if request.truncate_prompt_tokens is not None:
            tokens = tokens[-request.truncate_prompt_tokens :]
        return tuple(tokens)

    def _render(self, chat: ChatPrompt) -> list[int]:
        renderer = self._engine.renderer
        options = {"add_generation_prompt": chat.add_generation_prompt is not False}
        messages = [{"role": said.role, "content": said.content} for said in chat.messages]
        try:
            _, prompt = renderer.render_messages(messages, ChatParams(chat_template_kwargs=options))
        except (ValueError, VLLMClientError) as error:
            raise invalid("prompt.chat", f"the chat template refuses it ({' '.join(str(error).split())})") from error
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        return list(renderer.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False))


class _KvCacheUsage(StatLoggerBase):
    """One of vLLM's stat loggers, for one number."""

    def __init__(self) -> None:
        self.share = 0.0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.share = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        return None


def _served_model(settings: EngineSettings, engine: Any) -> ServedModel:
    config = engine.model_config
    defaults = config.get_diff_sampling_param()
    neutral = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    speculation = settings.speculation
    return ServedModel(
        name=settings.target.name,
        vocab_size=config.get_vocab_size(),
        max_model_len=config.max_model_len,
        max_logprobs=config.get_vocab_size() if config.max_logprobs == -1 else config.max_logprobs,
        has_chat_template=engine.renderer.get_tokenizer().chat_template is not None,
        default_sampling=Sampling(n=1, **{name: defaults.get(name, getattr(neutral, name)) for name in names}),
        default_max_tokens=defaults.get("max_tokens"),
        schedules_by_priority=engine.vllm_config.scheduler_config.policy == "priority",
        vllm_version=vllm.__version__,
        draft=None
        if speculation is None
        else ServedDraft(
            model=speculation.draft.name,
            method=speculation.method,
            num_speculative_tokens=speculation.num_speculative_tokens,
        ),
    )


def _sampling_params(request: Request, defaults: Sampling, max_tokens: int) -> SamplingParams:
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
        output_kind=RequestOutputKind.DELTA,
    )


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


def _check_bad_words(request: Request, tokenizer: Any) -> None:
    """vLLM's worker has room for so many of their tokens, and dies of one more."""
    words = request.sampling.bad_words
    if not words:
        return
    parameters = SamplingParams(bad_words=list(words))
    try:
        parameters.update_from_tokenizer(tokenizer)
    except VLLMValidationError as error:
        raise _refused(request, error) from error
    tokens, most = sum(map(len, parameters.bad_words_token_ids or ())), vllm.envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if tokens > most:
        raise invalid("sampling.bad_words", f"{tokens:,} tokens; at most {most:,}")


def _refused(request: Request, error: VLLMClientError) -> RequestError:
    """vLLM's refusal, with our path of the field that it names."""
    named: str | None = getattr(error, "parameter", None)
    if named is not None:
        field = _PATHS.get(named, named)
    else:
        constraint = request.structured_output
        field = "" if constraint is None else f"structured_output.{constraint.kind}"
    return invalid(field, " ".join(str(error).split()))


_PATHS: dict[str, str] = {
    **{name: f"sampling.{name}" for name in Sampling.__slots__},
    "max_tokens": "stopping.max_tokens",
    "stop_token_ids": "stopping.stop_token_ids",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
}
"""Our paths by vLLM's names."""
