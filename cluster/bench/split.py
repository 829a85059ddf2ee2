"""`python -m cluster.bench.split`: what it costs a round that the draft is in a process of its own.

The same pair runs twice, draft in the target's process and draft in another, with the same requests and so with the
same rounds. The two engines take turns, a step each: what else the machine does then hits both. Only rounds in which
every request verifies a whole proposal are counted.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from cluster.bench import two_engines
from cluster.channel.base import ChannelKind
from cluster.commands.terminal import DebugOption, JsonOption, command, messages, output
from cluster.contract.policy import Policy
from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.speculation.rounds import RoundTimes

_PROMPT_TOKENS = 16
# Not counted: the first steps after the prompts fill caches of Python's and of the processor's.
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of one engine, in seconds. `parts` is None where the draft is in the same process."""

    step: float
    propose: float
    parts: RoundTimes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one figure: the median of all rounds, and the least and the greatest of the repeats' medians."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, repeats: Sequence[Sequence[float]]) -> "Spread":
        medians = [statistics.median(repeat) for repeat in repeats]
        everything = [value for repeat in repeats for value in repeat]
        return cls(median=statistics.median(everything), least=min(medians), greatest=max(medians))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A round of `requests` requests: milliseconds by part, bytes, and the same round with the draft colocated."""

    requests: int
    rounds: int
    repeats: int
    target_ms: Spread
    fuse_ms: Spread
    encode_ms: Spread
    transfer_ms: Spread
    draft_ms: Spread
    decode_ms: Spread
    wait_ms: Spread
    propose_ms: Spread
    step_ms: Spread
    request_bytes: int
    reply_bytes: int
    colocated_propose_ms: Spread
    colocated_step_ms: Spread
    split_share: Spread
    """What the split itself takes (encoding, transfer, decoding), as a share of the step."""
    propose_ratio: Spread
    step_ratio: Spread
    """Separate over colocated, of two rounds that followed each other."""


class _Arm:
    """One engine, a step at a time."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.engine = engine
        self._speculator: Any = engine.vllm_engine.model_executor.driver_worker.worker.model_runner.speculator
        self._times: RoundTimes | None = engine.speculator.times if isinstance(engine, SeparateEngine) else None
        self._steps = 0
        self._rounds: list[Round] = []

    @contextmanager
    def running(self, requests: Sequence[GenerationRequest], num_tokens: int) -> Iterator[list[Round]]:
        """Start the requests; their rounds of `num_tokens` scheduled tokens, as `advance` makes them."""
        vllm_engine = self.engine.vllm_engine
        step, propose = vllm_engine.step, self._speculator.propose
        proposals: list[Round] = []

        def timed_propose(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            before = replace(self._times) if self._times is not None else None
            begun = time.perf_counter()
            drafts = propose(batch, *arguments, **keywords)
            took = time.perf_counter() - begun
            if (batch.num_reqs, batch.num_tokens) == (len(requests), num_tokens):
                parts = self._times.since(before) if self._times is not None and before is not None else None
                proposals.append(Round(step=0.0, propose=took, parts=parts))
            return drafts

        def timed_step() -> Any:
            begun = time.perf_counter()
            outputs = step()
            took = time.perf_counter() - begun
            self._rounds.extend(replace(proposal, step=took) for proposal in proposals)
            proposals.clear()
            self._steps += 1
            return outputs

        self._rounds = []
        vllm_engine.step, self._speculator.propose = timed_step, timed_propose
        try:
            with closing(self.engine.stream(requests)) as self._stream:
                yield self._rounds
        finally:
            vllm_engine.step, self._speculator.propose = step, propose

    def advance(self) -> bool:
        """One step; False where all requests have ended."""
        before = self._steps
        while self._steps == before:  # a step's outputs come one by one
            if next(self._stream, None) is None:
                return False
        return True


def measure(
    colocated: InProcessEngine,
    separate: SeparateEngine,
    num_requests: int,
    num_speculative_tokens: int,
    *,
    rounds: int,
    repeats: int,
    progress: Callable[[str], None],
) -> Price:
    """Run both engines `repeats` times, in turns, for so many rounds each.

    Raises:
        UserError: the draft was lost, or the requests ended too early.
    """
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(range(first, first + _PROMPT_TOKENS)),
            max_tokens=_max_tokens(rounds, num_speculative_tokens),
            ignore_eos=True,
        )
        for first in range(100, 100 + num_requests)
    ]
    pairs: list[list[tuple[Round, Round]]] = []
    for repeat in range(1, repeats + 1):
        progress(f"{_counted(num_requests)}, repeat {repeat} of {repeats}")
        arms = [_Arm(colocated), _Arm(separate)]
        num_tokens = num_requests * (1 + num_speculative_tokens)
        with arms[0].running(requests, num_tokens) as theirs, arms[1].running(requests, num_tokens) as ours:
            turns = arms if repeat % 2 else arms[::-1]
            while len(ours) < _WARM_UP_ROUNDS + rounds and all(arm.advance() for arm in turns):
                pass
            pairs.append(list(zip(theirs, ours, strict=False))[_WARM_UP_ROUNDS:])
        if separate.speculator.lost is not None:
            raise UserError("the draft was lost", separate.speculator.lost, "look at what its process wrote last")
        if not pairs[-1]:
            raise UserError(
                _counted(num_requests),
                "there was no round in which each of them verified a whole proposal",
                "measure more rounds, or fewer requests",
            )
    return _price(num_requests, pairs)


def _max_tokens(rounds: int, num_speculative_tokens: int) -> int:
    """So that nobody ends before the last round, even if all is accepted."""
    return (1 + _WARM_UP_ROUNDS + rounds) * (1 + num_speculative_tokens)


def _price(num_requests: int, pairs: list[list[tuple[Round, Round]]]) -> Price:
    def ms(figure: Callable[[Round], float]) -> Spread:
        return _spread(pairs, lambda _, separate: 1e3 * figure(separate))

    def part(figure: Callable[[RoundTimes], float]) -> Spread:
        return ms(lambda round: figure(_parts(round)))

    last = _parts(pairs[-1][-1][1])
    return Price(
        requests=num_requests,
        rounds=sum(map(len, pairs)),
        repeats=len(pairs),
        target_ms=ms(lambda round: round.step - round.propose),
        fuse_ms=part(lambda times: times.fuse),
        encode_ms=part(lambda times: times.encode),
        transfer_ms=part(lambda times: times.transfer),
        draft_ms=part(lambda times: times.draft),
        decode_ms=part(lambda times: times.decode),
        wait_ms=part(lambda times: times.round_trip),
        propose_ms=ms(lambda round: round.propose),
        step_ms=ms(lambda round: round.step),
        request_bytes=last.request_bytes,
        reply_bytes=last.reply_bytes,
        colocated_propose_ms=_spread(pairs, lambda colocated, _: 1e3 * colocated.propose),
        colocated_step_ms=_spread(pairs, lambda colocated, _: 1e3 * colocated.step),
        split_share=_spread(pairs, lambda _, separate: _parts(separate).split / separate.step),
        propose_ratio=_spread(pairs, lambda colocated, separate: separate.propose / colocated.propose),
        step_ratio=_spread(pairs, lambda colocated, separate: separate.step / colocated.step),
    )


def _spread(pairs: list[list[tuple[Round, Round]]], figure: Callable[[Round, Round], float]) -> Spread:
    return Spread.of([[figure(*pair) for pair in repeat] for repeat in pairs])


def _parts(separate: Round) -> RoundTimes:
    assert separate.parts is not None
    return separate.parts


@command
def main(
    target: Annotated[str, typer.Option(help="The target's folder.")],
    draft: Annotated[str, typer.Option(help="The draft's folder.")],
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafted a round; default: as trained.")] = None,
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests, once or more; default: 1, 8 and 32.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count in each repeat.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats, which take turns in who is first.")] = 3,
    channel: Annotated[ChannelKind, typer.Option(help="What carries a round.")] = "shm",
    kv_sharing: Annotated[
        Literal["auto", "map", "mirror"], typer.Option(help="How a draft that reads its target's KV gets at it.")
    ] = "auto",
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Time rounds with the draft in the target's process, and in one of its own."""
    two_engines.prepare()
    counts = requests or [1, 8, 32]
    model = open_model(target, role="target")
    speculation = plan_speculation(model, open_model(draft, role="draft"), num_speculative_tokens)
    tokens = speculation.num_speculative_tokens
    settings = EngineSettings(
        target=model,
        speculation=speculation,
        max_model_len=_PROMPT_TOKENS + _max_tokens(rounds, tokens),
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(counts) * max(_PROMPT_TOKENS, 1 + tokens),
    )
    with (
        messages.status("loading the pair twice") as status,
        SeparateEngine(settings, channel=channel, policy=Policy(kv_sharing=kv_sharing)) as separate,
        InProcessEngine(settings) as colocated,
    ):
        prices = [
            measure(colocated, separate, count, tokens, rounds=rounds, repeats=repeats, progress=status.update)
            for count in counts
        ]
    if json_output:
        print(json.dumps({"channel": channel, "num_speculative_tokens": tokens, "prices": list(map(asdict, prices))}))
        return
    output().print(_table(prices))


_ROWS = {
    "target": "target_ms",
    "fuse": "fuse_ms",
    "encode": "encode_ms",
    "transfer": "transfer_ms",
    "draft": "draft_ms",
    "decode": "decode_ms",
    "wait": "wait_ms",
    "propose": "propose_ms",
    "step": "step_ms",
    "colocated propose": "colocated_propose_ms",
    "colocated step": "colocated_step_ms",
}


def _table(prices: Sequence[Price]) -> Table:
    table = Table(
        "ms a round",
        caption="median of all rounds (least–greatest median of a repeat)\n"
        "wait = transfer + draft; split = encode + transfer + decode",
    )
    for price in prices:
        table.add_column(_counted(price.requests), justify="right", no_wrap=True)
    for name, field in _ROWS.items():
        table.add_row(name, *(_shown(getattr(price, field), _digits) for price in prices))
    table.add_section()
    table.add_row("split / step", *(_shown(price.split_share, "{:.1%}".format) for price in prices))
    table.add_row("propose / colocated", *(_shown(price.propose_ratio, "{:.2f}".format) for price in prices))
    table.add_row("step / colocated", *(_shown(price.step_ratio, "{:.2f}".format) for price in prices))
    table.add_section()
    table.add_row("bytes out", *(f"{price.request_bytes:,}" for price in prices))
    table.add_row("bytes back", *(f"{price.reply_bytes:,}" for price in prices))
    return table


def _shown(spread: Spread, form: Callable[[float], str]) -> str:
    return f"{form(spread.median)} ({form(spread.least)}–{form(spread.greatest)})"


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.0f}"


def _counted(num_requests: int) -> str:
    return f"{num_requests} request{'s' * (num_requests > 1)}"


if __name__ == "__main__":
    typer.run(main)
