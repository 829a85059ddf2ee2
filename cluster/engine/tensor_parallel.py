"""An engine over several devices of one host. The first of its tensor-parallel ranks is a worker in this process, as
that of an engine on one device, and each other one has a process of its own.

vLLM's own executor of several ranks (`MultiprocExecutor`) has all of them in other processes, where nothing here could
look at the first one's rounds with its draft. Here each command goes to the others through a pipe, and then the first
runs it, too.
"""

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import cloudpickle
import torch
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from cluster.channel.segment import ENGINE, new_name, unlink_group
from cluster.contract.errors import ContractViolation
from cluster.engine.stuck import end_if_stuck, end_stuck
from cluster.errors import UserError

log = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 10.0
"""For a rank to unload vLLM, which takes 3 s, longer on a busy host. It has nothing to save."""

STUCK_AFTER_S: Final = 10.0
"""For a call to fail that waits for a rank that is gone. gloo's fail at once; a GPU's kernel waits for ever."""

_WATCH_INTERVAL_S: Final = 0.5

_DYING_S: Final = 2.0
"""From when a process's sockets close to when it can be waited for."""


class RankLost(UserError):  # noqa: N818 - it names what happened, as ContractViolation does
    """A rank has failed, or its process has ended: the engine can't go on."""


class TensorParallelExecutor(UniProcExecutor):
    """`EngineArgs(tensor_parallel_size=T, distributed_executor_backend=<its qualified name>)`.

    Whatever fails in one rank ends the engine: the others may wait for it in a collective operation. What waits for it
    on a device can't be ended: then this process ends, too, with exit code 1.
    """

    def _init_executor(self) -> None:
        size = self.parallel_config.world_size
        if current_platform.is_cuda() and current_platform.device_count() < size:
            raise UserError(
                f"tensor_parallel_size {size}",
                f"this process sees {current_platform.device_count()} GPUs",
                "lower it, or give the target as many",
            )
        self._lost: RankLost | None = None
        self._losing = threading.Lock()
        self._closed = False
        self._busy_since_s: float | None = None
        self._on_failure: Callable[[], None] | None = None
        # A CPU with AVX-512 names shared memory after it, by which `remove_orphans` then knows whose that is.
        self._group = new_name(ENGINE)
        self._init_method = f"file://{Path(tempfile.gettempdir()) / self._group}"
        self.others = [_OtherRank(self.vllm_config, rank, self._init_method) for rank in range(1, size)]
        self._end_others = weakref.finalize(self, _end, self.others)
        watched = weakref.ref(self), self.others
        threading.Thread(target=_watch, args=watched, name="dspark-ranks", daemon=True).start()
        with self._working():
            super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._init_method, 0, 0

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """As the base's. `single_value`: the first rank's answer alone; the others run it and don't answer.

        Raises:
            RankLost: a rank's process has ended, before or meanwhile, or it answers that it has failed.
        """
        named = method if isinstance(method, str) else cloudpickle.dumps(method)
        command = ForkingPickler.dumps((named, args, kwargs or {}, not single_value))
        with self._working():
            for other in self.others:
                other.send(command)
            own = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
            if single_value:
                return _Watched(own, self._working) if non_block else own
            if non_block:
                raise NotImplementedError(f"{method}: the answers of all ranks are waited for")
            return own + [other.answer() for other in self.others]

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        with self._losing:
            self._on_failure = callback
            is_lost = self._lost is not None
        if is_lost:
            callback()

    def check_health(self) -> None:
        if self._lost is not None:
            raise self._lost

    def shutdown(self) -> None:
        """A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for other in self.others:
            other.ask_to_end()
        self._busy_since_s = time.monotonic()
        super().shutdown()
        _leave_groups()
        self._busy_since_s = None
        for other in self.others:
            wait([other.process.sentinel], STOP_TIMEOUT_S)
        self._end_others()
        unlink_group(self._group)

    def follow_loss(self, lost: RankLost) -> None:
        """In the thread that watches: until nothing here can wait for that rank any more."""
        if self._closed:
            return
        self._lose(lost, raises=False)
        begun_s = time.monotonic()
        if current_platform.is_cuda():
            # Whatever is called next, closing included, would wait for a kernel that does.
            end_if_stuck(torch.cuda.synchronize, STUCK_AFTER_S)
        while (since_s := self._busy_since_s) is not None or not self._closed:
            time.sleep(_WATCH_INTERVAL_S)
            if since_s is not None and time.monotonic() > max(begun_s, since_s) + STUCK_AFTER_S:
                end_stuck()

    def _lose(self, lost: RankLost, *, raises: bool) -> None:
        """From any thread: the engine can't go on, and whoever finds it first says so. `raises`: the caller raises it,
        which is heard where the engine is used directly. A core in between, which has registered for failures, may
        take the error for that of one call, such as for its metrics."""
        with self._losing:
            if self._lost is not None:
                return
            self._lost, on_failure = lost, self._on_failure
        if on_failure is not None or not raises:
            log.error("%s", lost)
        if on_failure is not None:
            on_failure()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """What the first rank does, and may wait for the others in."""
        if self._lost is not None:
            raise self._lost
        self._busy_since_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            says_why = isinstance(error, UserError | ContractViolation)
            cause = error if says_why else self._loss() or error
            self._lose(cause if isinstance(cause, RankLost) else _failed(cause), raises=True)
            self._end_others()
            if cause is error:
                raise
            raise cause from error
        finally:
            self._busy_since_s = None

    def _loss(self) -> RankLost | None:
        """Why what waited for another rank has failed, if that rank has ended."""
        ended = wait([other.process.sentinel for other in self.others], _DYING_S)
        return next((other.lost() for other in self.others if other.process.sentinel in ended), None)


_REMEDY: Final = "look at what the processes wrote last, and start the engine again"


def _failed(error: BaseException) -> RankLost:
    return RankLost("an engine of several ranks", f"it has failed ({error})", _REMEDY)


class _OtherRank:
    """This process's end of a rank that isn't the first."""

    def __init__(self, vllm_config: Any, rank: int, init_method: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._rank = rank
        self._waiting = threading.Lock()  # a process can be waited for by one thread at a time
        self._connection, theirs = context.Pipe()
        arguments = (vllm_config, rank, init_method, theirs)
        self.process = context.Process(target=_run_rank, args=arguments, name=f"dspark-rank-{rank}", daemon=True)
        self.process.start()
        theirs.close()

    def send(self, command: Any) -> None:
        self._connection.send_bytes(command)

    def answer(self) -> Any:
        """Raises RankLost: the rank has failed; EOFError: its process has ended."""
        fault, value = self._connection.recv()
        if fault is not None:
            raise RankLost(f"tensor-parallel rank {self._rank}", f"it has failed ({fault})", _REMEDY)
        return value

    def lost(self) -> RankLost:
        """What a process that has ended means."""
        with self._waiting:
            self.process.join(_DYING_S)
            why = f"its process has ended with exit code {self.process.exitcode}"
        return RankLost(f"tensor-parallel rank {self._rank}", why, _REMEDY)

    def ask_to_end(self) -> None:
        with suppress(OSError):  # it has ended
            self._connection.send(None)

    def end(self) -> None:
        """At once: it may wait for a rank that has failed."""
        self._connection.close()
        with self._waiting:
            self.process.kill()
            self.process.join()


class _Watched(Future[Any]):
    """An output that may not be there yet, and the context to wait for it in."""

    def __init__(self, output: Future[Any], working: Callable[[], Any]) -> None:
        super().__init__()
        self._output = output
        self._working = working

    def done(self) -> bool:
        return self._output.done()

    def result(self, timeout: float | None = None) -> Any:
        with self._working():
            return self._output.result(timeout)


def _end(others: Sequence[_OtherRank]) -> None:
    for other in others:
        other.end()


def _watch(executor: weakref.ref[TensorParallelExecutor], others: Sequence[_OtherRank]) -> None:
    ended = wait([other.process.sentinel for other in others])
    alive = executor()
    if alive is not None:
        alive.follow_loss(next(other.lost() for other in others if other.process.sentinel in ended))


def _run_rank(vllm_config: Any, rank: int, init_method: str, connection: Connection) -> None:
    """The process of a rank: a worker that does what the first one's executor says, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank's process ends this one
    threading.Thread(target=_end_with_parent, name="dspark-parent", daemon=True).start()
    wrapper = WorkerWrapperBase(rpc_rank=rank)
    arguments = {
        "vllm_config": vllm_config,
        "local_rank": rank,
        "rank": rank,
        "distributed_init_method": init_method,
        "is_driver_worker": False,
    }
    wrapper.init_worker(all_kwargs=[{}] * rank + [arguments])
    wrapper.init_device()
    wrapper.load_model()
    current_platform.update_block_size_for_backend(vllm_config)
    with suppress(EOFError):  # the executor is gone without a word
        while (command := connection.recv()) is not None:
            method, args, kwargs, answers = command
            try:
                value = run_method(wrapper, method, args, kwargs)
            except Exception as error:
                if answers:
                    connection.send((str(error), None))
                raise  # others may wait for this rank: its end is what they notice
            if answers:
                connection.send((None, value))
    wrapper.shutdown()
    _leave_groups()


def _leave_groups() -> None:
    """In each rank, while the others do: NCCL ends a group with all who are in it, and may wait for one that has gone.
    vLLM would do it in the first rank's process alone, when the others have ended; it finds it done."""
    destroy_model_parallel()
    destroy_distributed_environment()


def _end_with_parent() -> None:
    """It may be in a collective operation, which doesn't end with the parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)
