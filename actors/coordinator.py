"""The coordinators of all pairs, in one actor: each pair has one of its own."""

import asyncio
import json
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, TypeVar

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from actors.again import was_restarted
from actors.names import kv_namespace
from actors.ports import free_port
from cluster.contract.contract import KVContract
from cluster.contract.policy import Policy
from cluster.control.service import serving
from cluster.control.settings import CoordinatorSettings
from cluster.control.state import NEW, MemberView, Record
from cluster.control.state import Coordinator as StateMachine

T = TypeVar("T")

_KEPT_AS: Final = b"coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairView:
    """One pair as its coordinator sees it. `epoch` is that of the last pairing, 0 before the first."""

    epoch: int
    digest: str
    """Of the contract; empty before there is one."""
    contract: str
    """As JSON."""
    members: tuple[MemberView, ...]


class Coordinator:
    """Serves from its constructor on, and restarts as often as it dies. What a restart must not forget, epochs,
    contracts and ports, is in Ray's own key-value store, which outlives it.

    A pair goes on without it. A process that joins later needs it at the address that it had.
    """

    def __init__(self, policy: Policy, pairs: int, host: str) -> None:
        self._policy = policy
        self._host = host
        self._kept = _read() if was_restarted() else []
        self._kept = self._kept or [{"port": free_port(host), **asdict(NEW)} for _ in range(pairs)]
        self._machines: list[StateMachine] = []
        self._serving = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="dspark-coordinator", daemon=True).start()
        self._run(self._serve())

    def addresses(self) -> list[str]:
        """Each pair's, for its members."""
        return list(map(self._address, range(len(self._kept))))

    def pairs(self) -> list[PairView]:
        """What each pair is doing."""
        return self._run(self._look())

    def stop(self) -> None:
        """Serve no longer, and forget."""
        self._run(self._serving.aclose())
        _internal_kv_del(_KEPT_AS, namespace=kv_namespace())

    async def _look(self) -> list[PairView]:
        # In the loop that changes them.
        return [
            PairView(
                epoch=machine.record.epoch,
                digest=KVContract.from_json(machine.record.contract).digest if machine.record.contract else "",
                contract=machine.record.contract,
                members=tuple(machine.members),
            )
            for machine in self._machines
        ]

    async def _serve(self) -> None:
        for pair in range(len(self._kept)):
            settings = CoordinatorSettings(address=self._address(pair), policy=self._policy)
            record = Record(epoch=self._kept[pair]["epoch"], contract=self._kept[pair]["contract"])
            service = serving(settings, record=record, keep=partial(self._keep, pair))
            self._machines.append(await self._serving.enter_async_context(service))
        _write(self._kept)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _address(self, pair: int) -> str:
        return f"{self._host}:{self._kept[pair]['port']}"

    def _keep(self, pair: int, record: Record) -> None:
        self._kept[pair] |= asdict(record)
        _write(self._kept)


COORDINATOR_ACTOR: Final[Any] = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=2)(
    Coordinator
)


def _read() -> list[dict[str, Any]]:
    """Empty where it died before it had begun to serve."""
    kept = _internal_kv_get(_KEPT_AS, namespace=kv_namespace())
    pairs: list[dict[str, Any]] = [] if kept is None else json.loads(kept)
    return pairs


def _write(kept: list[dict[str, Any]]) -> None:
    _internal_kv_put(_KEPT_AS, json.dumps(kept).encode(), overwrite=True, namespace=kv_namespace())
