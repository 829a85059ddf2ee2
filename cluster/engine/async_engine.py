"""vLLM's AsyncLLM as the service's engine: a process of its own runs the model, this one tokenizes and detokenizes."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Final

import grpc
import vllm
from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import ChatParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from cluster.engine import round_figures
from cluster.engine.async_outputs import DeltaReader
from cluster.engine.pair import TARGET_WORKER
from cluster.engine.parent import children_die_with_this_process
from cluster.engine.sampling_params import check_bad_words, refused, sampling_params
from cluster.engine.settings import EngineSettings
from cluster.engine.vllm_errors import EngineStartError, refused_settings
from cluster.serving.engine import EngineDeadError, EngineDelta
from cluster.serving.errors import RequestError, invalid
from cluster.serving.model import ServedDraft, ServedModel
from cluster.serving.types import ChatPrompt, Request, Sampling, TextPrompt, TokenPrompt
from cluster.speculation.rounds import RoundReport, RoundTimes

_CLOSE_TIMEOUT_S: Final = 25.0
"""For vLLM's processes to end by themselves. It allows its workers 5 s and 4 more, and by itself kills the engine's
process after 5, whose shared memory of 160 MiB then stays."""


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
        self._draft_is_remote = arguments.get("worker_cls") == TARGET_WORKER
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

    async def round_report(self) -> RoundReport | None:
        """Of the rounds with a draft in another process; None without one. Raises EngineDeadError."""
        if not self._draft_is_remote:
            return None
        try:
            plain, *_ = await self._engine.collective_rpc("round_report")  # of the rank that has the draft
        except VLLMEngineDeadError as error:
            raise EngineDeadError("the engine has died") from error
        return RoundReport(**plain | {"times": RoundTimes(**plain["times"])})

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
            parameters = sampling_params(request, self._model.default_sampling, max_tokens)
            # Closed here and now, not when it is collected: closing ends the request in the engine.
            outputs = self._engine.generate(prompt, parameters, request_id, priority=request.priority or 0)
            try:
                async for output in outputs:
                    yield reader.read(output)
            finally:
                await outputs.aclose()
        except VLLMClientError as error:
            raise refused(request, error) from error
        except VLLMEngineDeadError as error:
            raise EngineDeadError("the engine has died") from error
        except EngineGenerateError as error:
            raise RequestError(grpc.StatusCode.INTERNAL, "", "the engine failed this request") from error

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self._engine.abort(list(request_ids))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._engine.shutdown, _CLOSE_TIMEOUT_S)
            # Its __del__ shuts down once more, and at the interpreter's end there is nothing left to do it with.
            self._engine.shutdown = lambda *_: None

    def _prepare(self, request: Request) -> tuple[int, ...]:
        tokenizer = self._engine.renderer.get_tokenizer()
        check_bad_words(request, tokenizer)
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
    config, renderer = engine.model_config, engine.renderer
    defaults = config.get_diff_sampling_param()
    neutral = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    speculation = settings.speculation
    return ServedModel(
        name=settings.target.name,
        vocab_size=config.get_vocab_size(),
        max_model_len=config.max_model_len,
        max_logprobs=config.get_vocab_size() if config.max_logprobs == -1 else config.max_logprobs,
        # Other renderers than Hugging Face's have the model's conversation format built in.
        has_chat_template=not isinstance(renderer, HfRenderer) or renderer.get_tokenizer().chat_template is not None,
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
