"""Prompts and the target's answers to them, both made with vLLM in one engine.

The draft must learn what its target says, so answers always come from the target itself. Prompts are the user's own,
the bundled ones, and some that the target writes: given the beginning of a user's turn, it completes it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.engine.cpu import profile
from cluster.engine.in_process import InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.models.folder import ModelFolder
from cluster.training import wording
from cluster.training.chat import Chat
from cluster.training.data import Dialogue, append_dialogues, read_dialogues
from cluster.training.questions import normalised

# So many answers are made at once and then written to the file: what a stopped run can lose.
_CHUNK = 2048
_MAX_SEQS = 512  # the most that vLLM captures in a CUDA graph
_CPU_MAX_SEQS = 64
_SHARED_GPU_MEMORY = 0.05
# Of prompts that the target writes: longer ones ramble.
_WRITTEN_MAX_TOKENS = 160
# Of the prompts that aren't the user's: half of what a program puts together are word problems.
_WRITTEN_SHARE = 0.6

Advance = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """`num_prompts` besides the user's own; `sampled` is the share of answers at temperature 1, the others are greedy.

    `max_length` bounds prompt and answer together, `max_tokens` the answer; both in tokens. `shared` says that other
    engines are on the same GPU.
    """

    num_prompts: int
    max_tokens: int
    max_length: int
    sampled: float
    seed: int
    shared: bool = False


def make_dialogues(
    target: ModelFolder,
    own: Sequence[str],
    held_out: Iterable[str],
    settings: AnswerSettings,
    file: Path,
    advance: Advance,
) -> None:
    """Append dialogues to `file` until it has one for each prompt: a second call makes what the first left out.

    No prompt is one of `held_out`, compared without case and spacing. `advance` is told a stage and how many more of
    it are done.
    """
    prompts_file = file.with_name(file.name.replace("answers", "prompts"))
    prompts = [prompt for prompt, _ in read_dialogues(prompts_file)]
    done = len(read_dialogues(file))
    if prompts and done == len(prompts):
        return
    chat = Chat(target)
    with InProcessEngine(_engine_settings(target, settings)) as engine:
        sampler = _Sampler(engine.vllm_engine)
        if not prompts:
            texts = _unique(_texts(chat, own, settings, sampler, advance), {normalised(text) for text in held_out})
            prompts = [ids for ids in chat.encode(list(texts)) if len(ids) + 2 <= settings.max_length]
            append_dialogues(prompts_file, (Dialogue(ids, ()) for ids in prompts))
        advance("answers", done)
        every = round(1 / settings.sampled) if settings.sampled else 0
        for start in range(done, len(prompts), _CHUNK):
            chunk = prompts[start : start + _CHUNK]
            temperatures = [1.0 if every and (start + i) % every == 0 else 0.0 for i in range(len(chunk))]
            answers = sampler.complete(
                chunk,
                temperatures,
                settings.max_tokens,
                settings.max_length,
                partial(advance, "answers"),
            )
            append_dialogues(file, map(Dialogue, chunk, answers))


def _texts(
    chat: Chat, own: Sequence[str], settings: AnswerSettings, sampler: "_Sampler", advance: Advance
) -> Iterator[str]:
    yield from own
    written = int(_WRITTEN_SHARE * settings.num_prompts)
    programmed = settings.num_prompts - written
    yield from itertools.islice(wording.word_problems(settings.seed), programmed // 2)
    yield from itertools.islice(wording.requests(settings.seed), programmed - programmed // 2)
    yield from _written(chat, written, settings, sampler, advance)


def _written(chat: Chat, count: int, settings: AnswerSettings, sampler: "_Sampler", advance: Advance) -> Iterator[str]:
    """User's turns that the target completes; one that doesn't end by itself is dropped."""
    openings = list(itertools.islice(wording.openings(settings.seed), count))
    prompts = [chat.begin(opening) for opening in openings]
    limit = min(_WRITTEN_MAX_TOKENS, settings.max_length // 2)
    completions = sampler.complete(prompts, [1.0] * count, limit, settings.max_length, partial(advance, "prompts"))
    for opening, completion in zip(openings, completions, strict=True):
        if len(completion) < limit:
            yield (opening + chat.decode(completion)).strip()


def _unique(texts: Iterable[str], held_out: set[str]) -> Iterator[str]:
    seen = set(held_out)
    for text in texts:
        key = normalised(text)
        if key and key not in seen:
            seen.add(key)
            yield text


def _engine_settings(target: ModelFolder, settings: AnswerSettings) -> EngineSettings:
    seqs = _CPU_MAX_SEQS if profile.is_cpu_installation() else _MAX_SEQS
    whole = EngineSettings(target=target, max_model_len=settings.max_length, max_num_seqs=seqs, seed=settings.seed)
    if not settings.shared:
        return whole
    # With the size of the cache given, the share of the GPU only says what must be free at the start.
    cache_bytes = seqs * settings.max_length * _kv_bytes_per_token(target)
    return replace(whole, kv_cache_bytes=cache_bytes, gpu_memory_utilization=_SHARED_GPU_MEMORY)


def _kv_bytes_per_token(target: ModelFolder) -> int:
    """Keys and values of all layers, in 16 bits."""
    config = target.text_config
    heads = int(config["num_attention_heads"])
    width = int(config.get("num_key_value_heads") or heads) * int(
        config.get("head_dim") or config["hidden_size"] // heads
    )
    return 2 * 2 * int(config["num_hidden_layers"]) * width


class _Sampler:
    """Many completions at once through vLLM's own engine, token ids only."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ids = itertools.count()

    def complete(
        self,
        prompts: Sequence[tuple[int, ...]],
        temperatures: Sequence[float],
        max_tokens: int,
        max_length: int,
        advance: Callable[[int], None],
    ) -> list[tuple[int, ...]]:
        """Completions in the prompts' order, end token included; `advance` is told how many more are done."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        index_of: dict[str, int] = {}
        for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
            parameters = SamplingParams(
                temperature=temperature,
                max_tokens=min(max_tokens, max_length - len(prompt)),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            request_id = f"completion-{next(self._ids)}"
            index_of[request_id] = index
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(prompt)), parameters)
        completions: list[tuple[int, ...]] = [()] * len(prompts)
        done = 0
        while done < len(prompts):
            finished = [output for output in self._engine.step() if output.finished]
            for output in finished:
                completions[index_of[output.request_id]] = tuple(output.outputs[0].token_ids)
            if finished:
                done += len(finished)
                advance(len(finished))
        return completions
