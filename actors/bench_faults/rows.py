"""The rows of a cluster's table: each makes one fault happen under load, and compares what came of it with its bar."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import ray

from actors.answers import answer_of, ask_health
from actors.bench_faults.load import Answer, ask, ask_anew, failed, longest_gap_s
from actors.bench_faults.processes import actors_processes, family
from actors.commands.down import down
from actors.names import COORDINATOR, GATEWAY, member_name
from actors.session import session
from actors.target import ReplicaHealth
from cluster.bench.faults.figures import Figure, Row, span
from cluster.bench.faults.load import some_requests
from cluster.bench.faults.served import to_request
from cluster.bench.faults.waiting import wait_until
from cluster.channel.process import ProcessIdentity
from cluster.channel.segment import segments_of
from cluster.client import Client, ReplicaInfo, Request
from cluster.contract.facts import Role
from cluster.errors import UserError
from cluster.serving.router import Drained

NAMESPACE: Final = "dspark-cluster-faults"
REPLICAS: Final = 2
MAX_RUNNING: Final = 4
"""Of a replica."""

DETECTION_BAR_S: Final = 2.0

_BACK_TIMEOUT_S: Final = 500.0
"""For an actor to start again and to load, on a machine that does other things."""

_ENDED_TIMEOUT_S: Final = 15.0
"""For the last processes of a cluster that has been stopped."""

_POLL_S: Final = 0.02

_LOOK: Final = "look at the logs in Ray's session folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """Of a process whose replica ran so many requests. Seconds from its end on."""

    running: int
    detected_s: float
    back_s: float


@dataclass(slots=True, kw_only=True)
class ClusterBench:
    """A cluster, a load, and its answers while nothing is wrong."""

    address: str
    requests: Sequence[Request] = ()
    calm: Sequence[Answer] = ()
    processes: set[ProcessIdentity] = field(default_factory=set)
    """All that the cluster has had, as far as a row has seen them."""
    is_stopped: bool = False

    def begin(self, count: int) -> None:
        """Run a load of so many requests without a fault. Raises UserError where one isn't answered."""
        with Client(self.address) as client:
            vocab_size = client.model_info().vocab_size
        self.requests = [
            replace(to_request(request), request_id=f"fault-{index}")
            for index, request in enumerate(some_requests(count, vocab_size=vocab_size))
        ]
        self.calm = self._ask()
        if errors := [answer.error for answer in self.calm if answer.error]:
            raise UserError("the load without a fault", errors[0], _LOOK)

    def draft_killed(self, times: int) -> Row:
        """A draft worker's process, by SIGKILL, one and the other by turns; its replica goes on without proposals."""
        begun = time.monotonic()
        row = self._killed("draft worker killed", "draft", times)
        killed = [member_name("target", index) for index in range(min(times, REPLICAS))]
        with session(None, NAMESPACE):
            before = list(map(_accepted, killed))
            wrong = failed(self._ask(), self.calm)
            accepted = min(now - then for now, then in zip(map(_accepted, killed), before, strict=True))
        return replace(
            row,
            requests=row.requests + len(self.requests),
            figures=(
                *row.figures,
                Figure.none("failed or not exact when it is back", wrong),
                Figure.some("drafts accepted then", accepted),
            ),
            seconds=time.monotonic() - begun,
        )

    def replica_killed(self, times: int) -> Row:
        """A target replica's process, by SIGKILL, one and the other by turns; its requests go on elsewhere."""
        return self._killed("target replica killed", "target", times)

    def services_killed(self) -> Row:
        """Gateway and coordinator, by SIGKILL; clients repeat what they had asked, at the same address."""
        begun = time.monotonic()
        served_again: list[float] = []
        with session(None, NAMESPACE):
            members = self._look()

        def kill() -> None:
            for name in (COORDINATOR, GATEWAY):
                os.kill(members[name].pid, signal.SIGKILL)
            killed_s = time.monotonic()
            ask_anew(self.address, self.requests[0], patience_s=_BACK_TIMEOUT_S)
            served_again.append(time.monotonic() - killed_s)

        answers = self._ask(kill, patience_s=_BACK_TIMEOUT_S)
        wrong = failed(answers, self.calm) + failed(self._ask(), self.calm)
        with session(None, NAMESPACE):
            _await(lambda: ask_health(COORDINATOR, "pairs") is not None, COORDINATOR)
        return Row(
            fault="coordinator and gateway killed",
            requests=2 * len(self.requests),
            figures=(
                Figure.none("failed or not exact", wrong),
                Figure.some("asked again by their clients", sum(answer.repeats > 0 for answer in answers)),
                Figure(name="answers again after", value=span(served_again)),
            ),
            seconds=time.monotonic() - begun,
        )

    def replica_drained(self) -> Row:
        """Without a grace period: what runs there goes on elsewhere. It is drained from then on."""
        begun = time.monotonic()
        index = REPLICAS - 1
        name = member_name("target", index)
        drained: list[Drained] = []
        came: list[int] = []

        def drain() -> None:
            drained.append(answer_of(GATEWAY, ray.get_actor(GATEWAY).drain.remote(name, 0.0)))
            came.append(_came_to(name))

        with session(None, NAMESPACE), Client(self.address) as client:
            wrong = failed(self._ask(drain), self.calm)
            came.append(_came_to(name))
            state = _replica(client, index).state
        return Row(
            fault="target replica drained",
            requests=len(self.requests),
            figures=(
                Figure.none("failed or not exact", wrong),
                Figure.some("moved to the other one", sum(each.moved for each in drained)),
                Figure.none("came there afterwards", came[1] - came[0]),
                Figure(name="its state", value=state, is_met=state == "draining"),
            ),
            seconds=time.monotonic() - begun,
        )

    def stopped(self) -> Row:
        """As `dspark-cluster down` does, after all that has been killed."""
        begun = time.monotonic()
        with session(None, NAMESPACE):
            self._look()
        self.stop()
        deadline_s = time.monotonic() + _ENDED_TIMEOUT_S
        while (left := [each for each in self.processes if each.exists()]) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return Row(
            fault="cluster stopped after that",
            requests=0,
            figures=(
                Figure.some("processes seen", len(self.processes)),
                Figure.none("orphan processes", len(left)),
                Figure.none("segments of shared memory left", len(segments_of(self.processes))),
            ),
            seconds=time.monotonic() - begun,
        )

    def stop(self) -> None:
        if not self.is_stopped:
            down(None, NAMESPACE)
            self.is_stopped = True

    def _killed(self, fault: str, role: Role, times: int) -> Row:
        begun = time.monotonic()
        losses: list[_Loss] = []
        wrong, gap_s = 0, 0.0
        with session(None, NAMESPACE), Client(self.address) as client:
            for turn in range(times):
                index = turn % REPLICAS
                is_there = partial(_is_paired, index) if role == "draft" else partial(_is_ready, client, index)
                _await(is_there, member_name(role, index))
                process = self._look()[member_name(role, index)]
                answers = self._ask(partial(_kill, process, is_there, client, index, losses))
                wrong += failed(answers, self.calm)
                gap_s = max(gap_s, longest_gap_s(answers))
        detected = [loss.detected_s for loss in losses]
        running = ", ".join(str(loss.running) for loss in losses)
        return Row(
            fault=fault,
            requests=times * len(self.requests),
            figures=(
                Figure.none("failed or not exact", wrong),
                Figure(name="requests there", value=running, is_met=all(loss.running > 0 for loss in losses)),
                Figure(name="detected after", value=span(detected), is_met=max(detected) <= DETECTION_BAR_S),
                Figure(
                    name="longest pause of a stream beyond a usual one",
                    value=span([gap_s - longest_gap_s(self.calm)]),
                ),
                Figure(name="back after", value=span([loss.back_s for loss in losses])),
            ),
            seconds=time.monotonic() - begun,
        )

    def _ask(self, event: Callable[[], None] = lambda: None, *, patience_s: float = 0.0) -> list[Answer]:
        """As much at once as runs."""
        return ask(self.address, self.requests, event, at_once=REPLICAS * MAX_RUNNING, patience_s=patience_s)

    def _look(self) -> dict[str, ProcessIdentity]:
        """The actors' processes, by name; they and their children are remembered."""
        actors = actors_processes()
        for process in actors.values():
            self.processes |= family(process.pid)
        return actors


def _kill(
    process: ProcessIdentity, is_there: Callable[[], bool], client: Client, index: int, losses: list[_Loss]
) -> None:
    """Returns when the next one is there; the load goes on meanwhile."""
    running = _replica(client, index).running
    os.kill(process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    detected_s = _await(lambda: not is_there(), f"the end of process {process.pid}") - killed_s
    back_s = _await(is_there, "the next process") - killed_s
    losses.append(_Loss(running=running, detected_s=detected_s, back_s=back_s))


def _replica(client: Client, index: int) -> ReplicaInfo:
    return next(each for each in client.cluster_info() if each.name == member_name("target", index))


def _is_ready(client: Client, index: int) -> bool:
    return _replica(client, index).state == "ready"


def _is_paired(index: int) -> bool:
    """Whether its target and its draft make rounds together, as the coordinator knows it."""
    pairs = ask_health(COORDINATOR, "pairs")
    return pairs is not None and [member.activity for member in pairs[index].members] == ["ready", "ready"]


def _health(replica: str) -> ReplicaHealth:
    health: ReplicaHealth = answer_of(replica, ray.get_actor(replica).health.remote())
    return health


def _accepted(replica: str) -> int:
    """Drafted tokens, so far."""
    acceptance = _health(replica).acceptance
    return 0 if acceptance is None else acceptance.accepted


def _came_to(replica: str) -> int:
    """Requests, so far."""
    health = _health(replica)
    return health.requests + health.running


_await = partial(wait_until, timeout_s=_BACK_TIMEOUT_S, remedy=_LOOK)
