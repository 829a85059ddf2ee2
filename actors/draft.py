"""The draft worker: vLLM's own speculator, hosted for one target replica."""

import asyncio
import threading
import traceback
from dataclasses import dataclass
from typing import Any, Final

import ray

from actors.again import call_own, was_restarted
from actors.names import HEALTH
from cluster.config import ClusterConfig
from cluster.control.settings import MemberSettings
from cluster.engine.cpu import profile

_TO_TELL_S: Final = 10.0
"""Until the process of a worker that has failed ends: an `up` that waits for it hears the reason, and stops all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHealth:
    """Whether its coordinator knows of it; what it does then, the coordinator says."""

    host: str
    joined: bool


class DraftWorker:
    """Runs in a thread of its own, so that the actor answers while it loads and serves. Ray starts it again when its
    process has ended, and it goes on by itself."""

    def __init__(self, config: ClusterConfig, member: MemberSettings, host: str) -> None:
        """`host` is this host's address, as the target's reaches it."""
        profile.activate()  # before anything imports torch
        self._config = config
        self._member = member
        self._host = host
        self._joined = threading.Event()
        self._running: asyncio.Task[None] | None = None
        if was_restarted():
            call_own("run")

    async def run(self) -> None:
        """Join, pair, load and serve, for as long as this process can. It goes on without its caller; another one waits
        for the same end.

        Raises:
            UserError, ContractViolation: the pair can't start, and why; the target was told.
            Exception: what nobody foresaw. As after the others, the process ends a while later, once it had joined.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)

    @ray.method(concurrency_group=HEALTH)
    async def health(self) -> DraftHealth:
        return DraftHealth(host=ray.util.get_node_ip_address(), joined=self._joined.is_set())

    async def _run(self) -> None:
        # Here, not above: they import torch.
        from cluster.engine.build import engine_settings
        from cluster.engine.pair import draft_engine_args
        from cluster.speculation.draft_process import DraftSettings, end, run

        config, shared = self._config, self._config.pools.shared_gpu
        settings = DraftSettings(
            member=self._member,
            engine_args=draft_engine_args(
                engine_settings(config),
                config.contract,
                of_gpu=shared or config.pools.draft.num_gpus or 1.0,
                beside_target=shared is not None,
            ),
            host=self._host,
            faults=self._config.faults,
        )
        try:
            await asyncio.to_thread(run, settings, self._joined.set)
        except Exception:
            traceback.print_exc()  # of one that has served nobody may wait for the reason
            if self._joined.is_set():
                asyncio.get_running_loop().call_later(_TO_TELL_S, end, 1)
            raise
        end(1)  # a fresh process can serve again, and Ray starts one


DRAFT_ACTOR: Final[Any] = ray.remote(max_restarts=-1, concurrency_groups={HEALTH: 1})(DraftWorker)
