"""`python -m actors.bench_faults`: what a lost replica, gateway and coordinator cost a cluster's clients.

Two replicas with a draft worker each, in a Ray of this machine, under load. As `cluster.bench.faults`, which needs no
Ray, each row compares what came of its fault with its bar; the exit code is 1 where one isn't met.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import grpc
import ray
import typer

from actors.answers import ask_health
from actors.commands.down import down
from actors.commands.up import clock
from actors.names import COORDINATOR, GATEWAY, member_name
from actors.session import session
from actors.up import up
from cluster.bench.faults.load import Tokens, some_requests
from cluster.bench.faults.report import run_rows
from cluster.bench.faults.rows import Figure, Row
from cluster.bench.faults.served import to_request
from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import DIRECTORY
from cluster.client import Client, GenerationError, ReplicaInfo, Request
from cluster.commands.terminal import DebugOption, JsonOption, command
from cluster.config import ClusterConfig, GatewayConfig, ModelConfig, PoolConfig, PoolsConfig, RayConfig
from cluster.engine.settings import EngineOptions
from cluster.errors import UserError

NAMESPACE: Final = "dspark-cluster-faults"

DETECTION_BAR_S: Final = 2.0

_REPLICAS: Final = 2
_MAX_RUNNING: Final = 4
"""Of a replica."""

_BACK_TIMEOUT_S: Final = 500.0
"""For an actor to start again and to load, on a machine that does other things."""

_ENDED_TIMEOUT_S: Final = 15.0
"""For the last processes of a cluster that has been stopped."""

_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To one request. `error` is empty where it came to its end; `repeats` counts how often it was asked again."""

    tokens: Tokens
    longest_gap_s: float
    error: str = ""
    repeats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """Of a replica that ran so many requests. Seconds from its end on."""

    running: int
    detected_s: float
    back_s: float


@dataclass(slots=True, kw_only=True)
class ClusterBench:
    """A cluster, a load, and its answers while nothing is wrong."""

    address: str
    requests: Sequence[Request]
    calm: Sequence[Answer] = ()
    processes: set[ProcessIdentity] = field(default_factory=set)
    """All that the cluster has had, as far as a row has seen them."""
    is_stopped: bool = False

    def ask(self, event: Callable[[], None] = lambda: None, *, patience_s: float = 0.0) -> list[Answer]:
        """The load, as much at once as runs; the event happens when a third has ended. A request whose connection is
        lost is repeated, under its id, for `patience_s`."""
        with Client(self.address) as client, ThreadPoolExecutor(_REPLICAS * _MAX_RUNNING) as pool:
            answers = [pool.submit(_answer, client, request, patience_s) for request in self.requests]
            for ended, _ in enumerate(as_completed(answers), start=1):
                if ended == max(1, len(answers) // 3):
                    event()
            return [answer.result() for answer in answers]

    def replica_killed(self, times: int) -> Row:
        """A target replica's process, by SIGKILL, one and the other by turns; its requests go on elsewhere."""
        begun = time.monotonic()
        losses: list[_Loss] = []
        failed, gap_s = 0, 0.0
        for turn in range(times):
            name = member_name("target", turn % _REPLICAS)
            process = self._look()[name]
            answers = self.ask(partial(self._kill_replica, name, process, losses))
            failed += self._failed(answers)
            gap_s = max(gap_s, _longest_gap_s(answers))
        detected = [loss.detected_s for loss in losses]
        running = ", ".join(str(loss.running) for loss in losses)
        return Row(
            fault="target replica killed",
            requests=times * len(self.requests),
            figures=(
                Figure(name="failed, or a token lost or repeated", value=str(failed), is_met=failed == 0),
                Figure(name="ran there", value=running, is_met=all(loss.running > 0 for loss in losses)),
                Figure(name="detected after", value=_span(detected), is_met=max(detected) <= DETECTION_BAR_S),
                Figure(
                    name="longest pause of a stream beyond a usual one",
                    value=_span([gap_s - _longest_gap_s(self.calm)]),
                    is_met=True,
                ),
                Figure(name="replica back after", value=_span([loss.back_s for loss in losses]), is_met=True),
            ),
            seconds=time.monotonic() - begun,
        )

    def services_killed(self) -> Row:
        """Gateway and coordinator, by SIGKILL; clients repeat what they had asked, at the same address."""
        begun = time.monotonic()
        members = self._look()
        served_again: list[float] = []

        def kill() -> None:
            for name in (COORDINATOR, GATEWAY):
                os.kill(members[name].pid, signal.SIGKILL)
            killed_s = time.monotonic()
            _answer_at(self.address, self.requests[0])
            served_again.append(time.monotonic() - killed_s)

        answers = self.ask(kill, patience_s=_BACK_TIMEOUT_S)
        failed = self._failed(answers) + self._failed(self.ask())
        with session(None, NAMESPACE):
            _await(lambda: ask_health(COORDINATOR, "pairs") is not None, COORDINATOR)
        repeated = sum(answer.repeats > 0 for answer in answers)
        return Row(
            fault="coordinator and gateway killed",
            requests=2 * len(self.requests),
            figures=(
                Figure(name="failed or not exact", value=str(failed), is_met=failed == 0),
                Figure(name="asked again by their clients", value=str(repeated), is_met=True),
                Figure(name="answers again after", value=_span(served_again), is_met=True),
            ),
            seconds=time.monotonic() - begun,
        )

    def stopped(self) -> Row:
        """As `dspark-cluster down` does, after all that has been killed."""
        begun = time.monotonic()
        self._look()
        self.stop()
        deadline_s = time.monotonic() + _ENDED_TIMEOUT_S
        while (left := [each for each in self.processes if each.exists()]) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        owners = {f".{process.pid}.{process.start_ticks}." for process in self.processes}
        segments = [path for path in DIRECTORY.glob("dspark-*") if any(owner in path.name for owner in owners)]
        return Row(
            fault="cluster stopped after that",
            requests=0,
            figures=(
                Figure(name="processes seen", value=str(len(self.processes)), is_met=True),
                Figure(name="orphan processes", value=str(len(left)), is_met=not left),
                Figure(name="segments of shared memory left", value=str(len(segments)), is_met=not segments),
            ),
            seconds=time.monotonic() - begun,
        )

    def stop(self) -> None:
        if not self.is_stopped:
            down(None, NAMESPACE)
            self.is_stopped = True

    def _kill_replica(self, name: str, process: ProcessIdentity, losses: list[_Loss]) -> None:
        """Returns when it is back; the load goes on meanwhile."""
        with Client(self.address) as client:
            running = _replicas(client)[name].running
            os.kill(process.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            _await(lambda: _replicas(client)[name].state != "ready", f"the end of {name}")
            detected_s = time.monotonic() - killed_s
            _await(lambda: _replicas(client)[name].state == "ready", name)
            losses.append(_Loss(running=running, detected_s=detected_s, back_s=time.monotonic() - killed_s))

    def _look(self) -> dict[str, ProcessIdentity]:
        """The actors' processes, by name; they and their children are remembered."""
        with session(None, NAMESPACE):
            names = ray.util.list_named_actors()
            actors = {name: ProcessIdentity.of(process_of(name)) for name in names}
        for process in actors.values():
            self.processes |= _family(process.pid)
        return actors

    def _failed(self, answers: Sequence[Answer]) -> int:
        return sum(
            bool(answer.error) or answer.tokens != right.tokens
            for answer, right in zip(answers, self.calm, strict=True)
        )


def process_of(name: str) -> int:
    """The id of the process of an actor in this process's Ray namespace."""
    process: int = ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid()))
    return process


@contextmanager
def running_cluster(target: str, draft: str, requests: int, say: Callable[[str], None]) -> Iterator[ClusterBench]:
    """Start one, with a load of so many requests, and stop it when the block ends.

    Raises:
        UserError: it doesn't start, or doesn't answer as it should.
    """
    config = ClusterConfig(
        model=ModelConfig(target=target, draft=draft),
        engine=EngineOptions(
            max_model_len=256, max_num_seqs=_MAX_RUNNING, max_num_batched_tokens=64, num_gpu_blocks=16
        ),
        pools=PoolsConfig(replicas=_REPLICAS, target=PoolConfig(num_cpus=0.1), draft=PoolConfig(num_cpus=0.1)),
        gateway=GatewayConfig(port=0),
        ray=RayConfig(namespace=NAMESPACE),
    )
    with session(None, NAMESPACE, start=True, say=say):
        address = up(config, say).address
    bench = ClusterBench(address=address, requests=())
    try:
        say("runs the load without a fault")
        with Client(address) as client:
            vocab_size = client.model_info().vocab_size
        bench.requests = [
            replace(to_request(request), request_id=f"fault-{index}")
            for index, request in enumerate(some_requests(requests, vocab_size=vocab_size))
        ]
        bench.calm = bench.ask()
        if errors := [answer.error for answer in bench.calm if answer.error]:
            raise UserError("the load without a fault", errors[0], "look at the logs in Ray's session folder")
        yield bench
    finally:
        bench.stop()


def _answer(client: Client, request: Request, patience_s: float) -> Answer:
    deadline_s = time.monotonic() + patience_s
    repeats = 0
    while True:
        tokens: list[int] = []
        times: list[float] = []
        error = ""
        try:
            for response in client.stream(request):
                tokens += response.choices[0].token_ids
                times.append(time.monotonic())
        except GenerationError as failure:
            error = str(failure)
            if failure.status is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline_s:
                repeats += 1
                time.sleep(_POLL_S)
                continue
        gap_s = max((later - one for one, later in pairwise(times)), default=0.0)
        return Answer(tokens=tuple(tokens), longest_gap_s=gap_s, error=error, repeats=repeats)


def _answer_at(address: str, request: Request) -> Answer:
    """Of a client that comes anew, with a request of its own, for as long as there is no server."""
    with Client(address) as client:
        return _answer(client, replace(request, request_id=""), _BACK_TIMEOUT_S)


def _replicas(client: Client) -> dict[str, ReplicaInfo]:
    return {replica.name: replica for replica in client.cluster_info()}


def _await(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _BACK_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise UserError(
                what, f"it hasn't come in {_BACK_TIMEOUT_S:g} s", "look at the logs in Ray's session folder"
            )
        time.sleep(_POLL_S)


def _family(pid: int) -> set[ProcessIdentity]:
    """A process and all below it, as far as they live."""
    try:
        family = {ProcessIdentity.of(pid)}
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return family.union(*map(_family, children))


def _children(task: Path) -> list[str]:
    return (task / "children").read_text(encoding="ascii").split()


def _longest_gap_s(answers: Sequence[Answer]) -> float:
    return max(answer.longest_gap_s for answer in answers)


def _span(values: Sequence[float]) -> str:
    return "–".join(f"{max(0.0, value):.2f}" for value in sorted({min(values), max(values)})) + " s"


@command
def main(
    target: Annotated[str, typer.Option(help="The target's folder.")],
    draft: Annotated[str, typer.Option(help="The draft's folder.")],
    requests: Annotated[int, typer.Option(min=18, help="Of a load.")] = 200,
    kills: Annotated[int, typer.Option(min=1, help="Of a replica's process.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="A row by its name, once or more; default: all.")] = None,
    json_output: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - read by @command
) -> None:
    """Let a cluster's replicas, its gateway and its coordinator be killed, under load."""
    say = clock()
    with running_cluster(target, draft, requests, say) as bench:
        work: dict[str, Callable[[], Row]] = {
            "replica": lambda: bench.replica_killed(kills),
            "services": bench.services_killed,
            "end": bench.stopped,
        }
        run_rows(work, only, say, json_output=json_output)


if __name__ == "__main__":
    typer.run(main)
