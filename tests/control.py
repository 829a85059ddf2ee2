"""A coordinator in this process, members of it, and the facts of a pair for them to agree on."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.v1.control_pb2 import EngineSizes

from cluster.contract.facts import Role, SideFacts
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from cluster.control.member import Member
from cluster.control.service import serving
from cluster.control.settings import CoordinatorSettings, MemberSettings
from tests.unit.test_contract_pairs import qwen3_8b

FACTS: dict[Role, SideFacts] = dict(zip(("target", "draft"), qwen3_8b(), strict=True))
CONTRACT = negotiate(FACTS["target"], FACTS["draft"], Policy())
SIZES = EngineSizes(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=40_960)

DEADLINE_S = 20


@contextmanager
def coordinator(folder: Path, **more: int) -> Iterator[str]:
    """The address of one that runs in a thread."""
    address = f"unix:{folder / 'coordinator'}"
    started: Future[Callable[[], object]] = Future()

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(CoordinatorSettings(address=address, policy=Policy(), **more)):
            started.set_result(lambda: loop.call_soon_threadsafe(stop.set))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    end = started.result(DEADLINE_S)
    try:
        yield address
    finally:
        end()
        thread.join(DEADLINE_S)


def join(address: str, role: Role, *, start_timeout_s: float = DEADLINE_S, vllm: str = "0.32.0") -> Member:
    settings = MemberSettings(address=address, role=role, name=role, start_timeout_s=start_timeout_s)
    return Member(settings, vllm_version=vllm, engine_sizes=SIZES if role == "target" else None)


def together(*sides: Callable[[], Any]) -> list[Any]:
    """What each returns, or the first error; each runs in a thread of its own."""
    with ThreadPoolExecutor(len(sides)) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(side) for side in sides]]


def agree(target: Member, draft: Member) -> None:
    agreed = together(lambda: target.agree(FACTS["target"]), lambda: draft.agree(FACTS["draft"]))
    assert agreed == [CONTRACT, CONTRACT]


def pair_up(target: Member, draft: Member) -> None:
    """All phases until both serve."""
    agree(target, draft)
    together(lambda: target.accept(CONTRACT), lambda: draft.accept(CONTRACT))
    together(lambda: target.ready(CONTRACT), lambda: draft.ready(CONTRACT))
