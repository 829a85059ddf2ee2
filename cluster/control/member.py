"""One process's membership of a coordinator: the client, for a target's worker and a draft's process alike."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import grpc
from dspark.v1.control_pb2 import (
    Acceptance,
    ChannelAcceptance,
    ChannelAddress,
    ChannelOffer,
    EngineSizes,
    Facts,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRequest,
    JoinResponse,
    LossReason,
    PeerLost,
    Ready,
    RoundOptions,
    Versions,
)
from dspark.v1.control_pb2_grpc import ControlServiceStub

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.facts import SideFacts
from cluster.control.options import CLIENT_OPTIONS
from cluster.control.refusals import MEMBER_ROLES, ControlError, to_error, to_refusal
from cluster.control.settings import MemberSettings
from cluster.control.state import PROTOCOL_VERSION
from cluster.errors import UserError

JOIN_TIMEOUT_S: Final = 30.0
"""For a coordinator to answer that runs or is being started: it loads no model."""

LEAVE_TIMEOUT_S: Final = 5.0
"""For the goodbye to arrive. Nobody waits for an answer to it; a coordinator that is stopped costs this once."""

_LOST: Final = {
    LossReason.LOSS_REASON_LEFT: "it has left",
    LossReason.LOSS_REASON_STREAM_BROKEN: "its process has ended, or the connection to it",
    LossReason.LOSS_REASON_SILENT: "its process is silent",
    LossReason.LOSS_REASON_SUPERSEDED: "a later incarnation has taken its place",
    LossReason.LOSS_REASON_OUT_OF_TURN: "it sent a message that wasn't due",
}


class Member:
    """Each method is a phase, called in the order in which they stand here; each returns when the coordinator, or the
    peer, has answered.

    All that wait raise:
        ContractError: refused, or the peer can't keep the contract.
        ControlError: the peer is lost, nothing came in time, or the coordinator has gone. It names the phase.
    """

    def __init__(
        self,
        settings: MemberSettings,
        *,
        vllm_version: str,
        engine_sizes: EngineSizes | None = None,
        last_epoch: int = 0,
    ) -> None:
        """Join. `engine_sizes` are a target's, for its draft; `last_epoch` is that of the process's last pairing."""
        self._settings = settings
        self._epoch = 0
        self._on_silent_peer: Callable[[], None] = lambda: None
        self._inbox: queue.SimpleQueue[JoinResponse | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[JoinRequest | None] = queue.SimpleQueue()
        self._has_left = False
        self._ended = threading.Event()
        self._channel = grpc.insecure_channel(settings.address, options=CLIENT_OPTIONS)
        hello = Hello(
            role=MEMBER_ROLES[settings.role],
            name=settings.name,
            incarnation=time.time_ns(),
            versions=Versions(protocol=PROTOCOL_VERSION, vllm=vllm_version),
            engine_sizes=engine_sizes,
            last_epoch=last_epoch,
        )
        self._send(hello=hello)
        responses = ControlServiceStub(self._channel).Join(iter(self._outbox.get, None), wait_for_ready=True)
        self._listener = self._start_thread(self._listen, responses)
        try:
            welcome = self._wait("welcome", "the coordinator to welcome it", JOIN_TIMEOUT_S)
        except UserError:
            self.close()
            raise
        self._start_thread(self._beat, welcome.heartbeat_interval_ms / 1e3)

    @property
    def epoch(self) -> int:
        """Of the pairing; 0 before the peer has joined."""
        return self._epoch

    def meet_peer(self) -> Hello:
        """Wait for the other side to join; what it said of itself."""
        joined = self._wait("peer_joined", f"a {self._peer} to join")
        self._epoch = joined.epoch
        peer: Hello = joined.peer
        return peer

    def agree(self, facts: SideFacts, *, held: KVContract | None = None) -> KVContract:
        """Report what this side would allocate, and wait for the contract: `held`, if it has allocated by that."""
        if not self._epoch:
            self.meet_peer()
        held_json = "" if held is None else held.to_json()
        self._send(facts=Facts(epoch=self._epoch, json=facts.to_json(), held_contract_json=held_json))
        contract = self._wait("contract", f"the {self._peer} to load its model")
        return KVContract.from_json(contract.json)

    def accept(self, contract: KVContract) -> None:
        """Report that this side can keep the contract, and wait until the other says so too. Then both may allocate."""
        self._send(acceptance=Acceptance(epoch=self._epoch, digest=contract.digest))
        self._wait("allocate", f"the {self._peer} to accept the contract")

    def ready(self, contract: KVContract) -> None:
        """Report that this side has allocated what the contract says, and wait until the other has too."""
        self._send(ready=Ready(epoch=self._epoch, digest=contract.digest))
        self._wait("paired", f"the {self._peer} to allocate its KV cache")

    def offer_channel(self, address: ChannelAddress, options: RoundOptions) -> None:
        """Wait until the peer is about to open the channel."""
        self._send(channel_offer=ChannelOffer(epoch=self._epoch, address=address, round_options=options))
        self._wait("channel_acceptance", f"the {self._peer} to open the channel")

    def await_channel(self) -> ChannelOffer:
        """The channel that the peer offers."""
        offer: ChannelOffer = self._wait("channel_offer", f"the {self._peer} to offer a channel")
        return offer

    def accept_channel(self) -> None:
        self._send(channel_acceptance=ChannelAcceptance(epoch=self._epoch))

    def on_silent_peer(self, action: Callable[[], None]) -> None:
        """Call `action`, in a thread of this object, if the peer's process comes to a stand without ending."""
        self._on_silent_peer = action

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the other side why this one gives up, if the block raises UserError or ContractViolation."""
        try:
            yield
        except (UserError, ContractViolation) as error:
            self._leave(Goodbye(refusal=to_refusal(error, self._settings.role)))
            raise

    def close(self) -> None:
        """Say goodbye. A second call does nothing."""
        self._leave(Goodbye())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _peer(self) -> str:
        return "draft" if self._settings.role == "target" else "target"

    def _leave(self, goodbye: Goodbye) -> None:
        if self._has_left:
            return
        self._has_left = True
        self._send(goodbye=goodbye)
        self._outbox.put(None)
        self._listener.join(LEAVE_TIMEOUT_S)
        self._channel.close()

    def _send(self, **message: Any) -> None:
        self._outbox.put(JoinRequest(**message))

    def _wait(self, kind: str, what: str, timeout_s: float | None = None) -> Any:
        """The next message of this kind. `what` it waits for, as a person would say it."""
        timeout_s = self._settings.start_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                response = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise self._gave_up(what, f"it has not in {timeout_s:.0f} s") from None
            if response is None:
                self._inbox.put(None)  # for whoever asks next
                raise self._gave_up(what, f"the coordinator at {self._settings.address} is gone")
            came = response.WhichOneof("message")
            if came == "refusal":
                raise to_error(response.refusal)
            if came == "peer_lost":
                raise self._gave_up(what, f"the {self._peer} is lost: {_describe(response.peer_lost)}")
            if came == kind:
                return getattr(response, kind)

    def _gave_up(self, what: str, why: str) -> ControlError:
        return ControlError(
            f"{self._settings.name} waited for {what}", why, "look at what the processes wrote last, and start again"
        )

    def _listen(self, responses: Iterator[JoinResponse]) -> None:
        try:
            for response in responses:
                if response.peer_lost.reason == LossReason.LOSS_REASON_SILENT:
                    self._on_silent_peer()
                self._inbox.put(response)
        except grpc.RpcError:
            pass  # the connection ended, which the next to wait is told
        self._inbox.put(None)
        self._ended.set()
        self._outbox.put(None)  # releases gRPC's own thread, which waits for the next request

    def _beat(self, interval_s: float) -> None:
        while not self._ended.wait(interval_s):
            self._send(heartbeat=Heartbeat())

    def _start_thread(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        name = f"dspark-member-{function.__name__.strip('_')}"
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        thread.start()
        return thread


def _describe(lost: PeerLost) -> str:
    return f"{lost.name}, incarnation {lost.incarnation}, {_LOST.get(lost.reason, 'for a reason unknown here')}"
