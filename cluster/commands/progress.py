"""How far a batch is: a bar on a terminal, elsewhere a line every few seconds."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.batch.tally import Tally
from cluster.commands.terminal import messages

_BAR_PERIOD_S: Final = 0.25
_LINE_PERIOD_S: Final = 5.0


@asynccontextmanager
async def showing_progress(tally: Tally) -> AsyncIterator[None]:
    """Show it within the block, and how it stands at the block's end."""
    with _bar(tally) if messages.is_terminal else _lines(tally) as (show, period_s):
        showing = asyncio.create_task(_repeat(show, period_s))
        try:
            yield
        finally:
            showing.cancel()
            show()


async def _repeat(show: Callable[[], None], period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        show()


@contextmanager
def _bar(tally: Tally) -> Iterator[tuple[Callable[[], None], float]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    begun = time.monotonic()
    with Progress(*columns, console=messages) as progress:
        task = progress.add_task("", total=tally.total)
        yield (
            lambda: progress.update(task, completed=tally.ended, description=describe(tally, time.monotonic() - begun)),
            _BAR_PERIOD_S,
        )


@contextmanager
def _lines(tally: Tally) -> Iterator[tuple[Callable[[], None], float]]:
    begun = time.monotonic()

    def show() -> None:
        figures = describe(tally, time.monotonic() - begun)
        messages.print(f"{tally.ended:,} of {tally.total:,} lines; {figures}", soft_wrap=True)

    yield show, _LINE_PERIOD_S


def describe(tally: Tally, seconds: float) -> str:
    """This run's figures, `seconds` after it began."""
    rate = tally.completion_tokens / seconds if seconds else 0.0
    parts = [f"{tally.completion_tokens:,} tokens, {rate:,.1f} tokens/s"]
    if tally.acceptance is not None:
        parts.append(f"acceptance length {tally.acceptance.acceptance_length:.2f}")
    if failed := tally.failed.total():
        parts.append(f"{failed:,} failed")
    if tally.retries:
        parts.append(f"{tally.retries:,} repeated calls")
    return "; ".join(parts)
