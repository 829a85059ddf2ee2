"""The coordinator as a state machine: what members say goes in, what they are told comes out.

No sockets and no clock: a stream is a number, and the time comes with the message. `service` puts gRPC round it.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dspark.v1.control_pb2 import (
    Acceptance,
    Allocate,
    ChannelAcceptance,
    ChannelOffer,
    Contract,
    Facts,
    Goodbye,
    Hello,
    JoinRequest,
    JoinResponse,
    LossReason,
    MemberRole,
    Paired,
    PeerJoined,
    PeerLost,
    Ready,
    Refusal,
    Welcome,
)

from cluster.contract.again import negotiate_again
from cluster.contract.agree import check_same
from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError, DocumentError
from cluster.contract.facts import Role, SideFacts
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from cluster.control.refusals import MEMBER_ROLES, to_refusal
from cluster.control.settings import CoordinatorSettings
from cluster.errors import UserError

PROTOCOL_VERSION: Final = 1

_ROLES: "Final[dict[MemberRole.ValueType, Role]]" = {number: role for role, number in MEMBER_ROLES.items()}


class Phase(Enum):
    """Where a pair is, as the message that it waits for. Only forwards."""

    NEGOTIATING = "facts"
    CHECKING = "acceptance"
    ALLOCATING = "ready"
    SERVING = "channel messages"
    OVER = "goodbye"


_Report = Facts | Acceptance | Ready | ChannelOffer | ChannelAcceptance

_AWAITED: Final[dict[Phase, tuple[type[_Report], ...]]] = {
    Phase.NEGOTIATING: (Facts,),
    Phase.CHECKING: (Acceptance,),
    Phase.ALLOCATING: (Ready,),
    Phase.SERVING: (ChannelOffer, ChannelAcceptance),
}

_SHUT_OUT: "Final[dict[LossReason.ValueType, tuple[str, str]]]" = {
    LossReason.LOSS_REASON_SILENT: ("it wasn't heard for too long, and its peer was told", "start it again"),
    LossReason.LOSS_REASON_SUPERSEDED: ("a later incarnation of it has taken its place", "let this one end"),
    LossReason.LOSS_REASON_OUT_OF_TURN: ("it sent a message that isn't due", "run one version on both sides"),
}
"""Why a member's stream is ended from here, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a coordinator that is started again goes on from."""

    epoch: int = 0
    """Of the last pairing."""
    contract: str = ""
    """The last one issued, as JSON; empty before there is one."""


NEW: Final = Record()
"""Of a coordinator that begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """A member, for people. `epoch` is 0 while it waits for its peer."""

    role: Role
    name: str
    incarnation: int
    epoch: int
    activity: str
    """waiting, loading, negotiating, allocating, ready, or alone when its peer is lost."""


@dataclass(frozen=True, slots=True)
class Output:
    """What the member on `stream` is told. With `is_last`, its stream ends then."""

    stream: int
    response: JoinResponse
    is_last: bool = False


@dataclass(slots=True, kw_only=True)
class _Member:
    stream: int
    role: Role
    hello: Hello
    heard_s: float
    pair: "_Pair | None" = None


@dataclass(slots=True, kw_only=True)
class _Pair:
    epoch: int
    members: dict[Role, _Member]
    phase: Phase = Phase.NEGOTIATING
    reported: set[Role] = field(default_factory=set)
    """Who has sent what this phase waits for."""
    facts: dict[Role, SideFacts] = field(default_factory=dict)
    held: dict[Role, KVContract] = field(default_factory=dict)
    """What a side has allocated by already."""
    digest: str = ""
    """Of the contract, once there is one."""

    def peer_of(self, member: _Member) -> _Member:
        return self.members["draft" if member.role == "target" else "target"]


class Coordinator:
    """The members, and the one pair that a target and a draft among them are.

    A member is paired once. Whose peer is lost goes on alone, and comes back as another incarnation: of the same
    process, which has kept what it allocated, or of one that was started again. Either comes into another pairing, of
    the next epoch, and under the contract that a side holds.
    """

    def __init__(self, settings: CoordinatorSettings, record: Record = NEW) -> None:
        self._settings = settings
        self._members: dict[int, _Member] = {}
        self._epoch = record.epoch
        self._contract = record.contract
        self._outputs: list[Output] = []

    @property
    def record(self) -> Record:
        return Record(epoch=self._epoch, contract=self._contract)

    @property
    def members(self) -> list[MemberView]:
        return [
            MemberView(
                role=member.role,
                name=member.hello.name,
                incarnation=member.hello.incarnation,
                epoch=member.pair.epoch if member.pair is not None else 0,
                activity=_activity(member),
            )
            for member in self._members.values()
        ]

    def receive(self, stream: int, request: JoinRequest, now_s: float) -> list[Output]:
        """A message came. `now_s`: seconds of any clock that only goes forward."""
        kind = request.WhichOneof("message")
        member = self._members.get(stream)
        if member is not None:
            member.heard_s = now_s
        if kind is None or kind == "heartbeat":
            pass  # None: a message of a later version
        elif kind == "hello" and member is None:
            self._hello(stream, request.hello, now_s)
        elif member is None:
            begins = f"a stream that begins with {kind}"
            self._shut_out(stream, Refusal(what=begins, reason="a hello comes first", remedy="join first"))
        elif kind == "hello":
            self._lose(member, LossReason.LOSS_REASON_OUT_OF_TURN)
        elif kind == "goodbye":
            self._goodbye(member, request.goodbye)
        else:
            self._report(member, getattr(request, kind))
        return self._take_outputs()

    def broken(self, stream: int) -> list[Output]:
        """The stream has ended, in whatever way."""
        member = self._members.get(stream)
        if member is not None:
            self._lose(member, LossReason.LOSS_REASON_STREAM_BROKEN)
        return self._take_outputs()

    def expire(self, now_s: float) -> list[Output]:
        """Lose the members that have not been heard for too long."""
        for member in list(self._members.values()):
            if 1e3 * (now_s - member.heard_s) > self._settings.heartbeat_timeout_ms:
                self._lose(member, LossReason.LOSS_REASON_SILENT)
        return self._take_outputs()

    def _hello(self, stream: int, hello: Hello, now_s: float) -> None:
        refusal = self._why_not(hello)
        if refusal is not None:
            self._shut_out(stream, refusal)
            return
        role = _ROLES[hello.role]
        holder = self._holder_of(role)
        if holder is not None:
            self._lose(holder, LossReason.LOSS_REASON_SUPERSEDED)
        self._members[stream] = _Member(stream=stream, role=role, hello=hello, heard_s=now_s)
        welcome = Welcome(heartbeat_interval_ms=self._settings.heartbeat_interval_ms)
        self._tell(self._members[stream], JoinResponse(welcome=welcome))
        self._pair_up()

    def _why_not(self, hello: Hello) -> Refusal | None:
        """Why this process can't be a member, if it can't."""
        role, protocol = _ROLES.get(hello.role), hello.versions.protocol
        if protocol != PROTOCOL_VERSION:
            spoken = f"it speaks version {protocol} of control.proto, the coordinator {PROTOCOL_VERSION}"
            return Refusal(what=hello.name, reason=spoken, remedy="run one version of dspark-cluster everywhere")
        if role is None or (role == "target" and not hello.HasField("engine_sizes")):
            reason = "its hello has no role, or is a target's without sizes"
            return Refusal(what=hello.name, reason=reason, remedy="send a hello as control.proto has it")
        holder = self._holder_of(role)
        if holder is None or (hello.name == holder.hello.name and hello.incarnation > holder.hello.incarnation):
            return None
        return Refusal(
            what=f"{hello.name}, incarnation {hello.incarnation}",
            reason=f"{holder.hello.name}, incarnation {holder.hello.incarnation}, has the place of the {role} already",
            remedy="end the other first, or start a coordinator for each pair",
        )

    def _holder_of(self, role: Role) -> _Member | None:
        return next((member for member in self._members.values() if member.role == role), None)

    def _pair_up(self) -> None:
        free = {member.role: member for member in self._members.values() if member.pair is None}
        if len(free) < 2:
            return
        self._epoch = max(self._epoch, *(member.hello.last_epoch for member in free.values())) + 1
        pair = _Pair(epoch=self._epoch, members=free)
        for member in free.values():
            member.pair = pair
        versions = {role: member.hello.versions.vllm for role, member in free.items()}
        try:
            check_same("vllm_version", versions["target"], versions["draft"])  # not after minutes of loading
        except ContractError as error:
            self._refuse(pair, to_refusal(error, "draft"))
            return
        for member in free.values():
            joined = PeerJoined(epoch=pair.epoch, peer=pair.peer_of(member).hello)
            self._tell(member, JoinResponse(peer_joined=joined))

    def _report(self, member: _Member, message: _Report) -> None:
        pair = member.pair
        if pair is None:
            self._lose(member, LossReason.LOSS_REASON_OUT_OF_TURN)
        elif pair.phase is Phase.OVER or message.epoch != pair.epoch:
            return  # it crossed the news on its way, or is of an earlier pairing
        elif member.role in pair.reported or not isinstance(message, _AWAITED[pair.phase]):
            self._lose(member, LossReason.LOSS_REASON_OUT_OF_TURN)
        elif isinstance(message, Facts):
            self._facts(member, pair, message)
        elif isinstance(message, Acceptance | Ready):
            self._confirm(member, pair, message)
        elif isinstance(message, ChannelOffer):
            self._tell(pair.peer_of(member), JoinResponse(channel_offer=message))
        else:
            self._tell(pair.peer_of(member), JoinResponse(channel_acceptance=message))

    def _facts(self, member: _Member, pair: _Pair, message: Facts) -> None:
        try:
            facts = SideFacts.from_json(message.json)
            if facts.role != member.role:
                raise DocumentError("role", repr(facts.role), repr(member.role))
            pair.facts[member.role] = facts
            if message.held_contract_json:
                pair.held[member.role] = KVContract.from_json(message.held_contract_json)
            if self._all_reported(member, pair):
                contract = _contract(pair, self._settings.policy)
                pair.digest, self._contract = contract.digest, contract.to_json()
                issued = Contract(epoch=pair.epoch, json=self._contract)
                self._advance(pair, Phase.CHECKING, JoinResponse(contract=issued))
        except UserError as error:
            self._refuse(pair, to_refusal(error, member.role))

    def _confirm(self, member: _Member, pair: _Pair, message: Acceptance | Ready) -> None:
        if message.digest != pair.digest:
            what = f"the digest of the {member.role}'s contract is {message.digest or 'missing'}"
            reason = f"the coordinator issued {pair.digest}"
            self._refuse(pair, Refusal(what=what, reason=reason, remedy="run one version of dspark-cluster everywhere"))
        elif self._all_reported(member, pair):
            if pair.phase is Phase.CHECKING:
                self._advance(pair, Phase.ALLOCATING, JoinResponse(allocate=Allocate(epoch=pair.epoch)))
            else:
                self._advance(pair, Phase.SERVING, JoinResponse(paired=Paired(epoch=pair.epoch)))

    def _all_reported(self, member: _Member, pair: _Pair) -> bool:
        pair.reported.add(member.role)
        return len(pair.reported) == len(pair.members)

    def _advance(self, pair: _Pair, phase: Phase, response: JoinResponse) -> None:
        pair.phase = phase
        pair.reported.clear()
        for member in pair.members.values():
            self._tell(member, response)

    def _goodbye(self, member: _Member, goodbye: Goodbye) -> None:
        pair = member.pair
        if goodbye.HasField("refusal") and pair is not None and pair.phase is not Phase.OVER:
            self._refuse(pair, goodbye.refusal)
        else:
            self._lose(member, LossReason.LOSS_REASON_LEFT)

    def _refuse(self, pair: _Pair, refusal: Refusal) -> None:
        """There is no pair: both sides are told the same, and are members no longer."""
        pair.phase = Phase.OVER
        for member in pair.members.values():
            self._shut_out(member.stream, refusal)

    def _lose(self, member: _Member, reason: "LossReason.ValueType") -> None:
        pair = member.pair
        if reason in _SHUT_OUT:
            why, remedy = _SHUT_OUT[reason]
            self._shut_out(member.stream, Refusal(what=member.hello.name, reason=why, remedy=remedy))
        else:
            del self._members[member.stream]
        if pair is not None and pair.phase is not Phase.OVER:
            pair.phase = Phase.OVER
            lost = PeerLost(
                epoch=pair.epoch,
                role=member.hello.role,
                name=member.hello.name,
                incarnation=member.hello.incarnation,
                reason=reason,
            )
            self._tell(pair.peer_of(member), JoinResponse(peer_lost=lost))

    def _shut_out(self, stream: int, refusal: Refusal) -> None:
        self._members.pop(stream, None)
        self._outputs.append(Output(stream, JoinResponse(refusal=refusal), is_last=True))

    def _tell(self, member: _Member, response: JoinResponse) -> None:
        self._outputs.append(Output(member.stream, response))

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs


def _contract(pair: _Pair, policy: Policy) -> KVContract:
    """Raises ContractError."""
    sides = pair.facts["target"], pair.facts["draft"]
    if not pair.held:
        return negotiate(*sides, policy)
    digests = {role: held.digest for role, held in pair.held.items()}
    if len(set(digests.values())) > 1:
        raise ContractError(
            "contract.digest",
            target=digests["target"],
            draft=digests["draft"],
            reason="each side has allocated its KV cache, under another contract",
            remedy="start the draft's process again",
        )
    return negotiate_again(*sides, policy, next(iter(pair.held.values())))


def _activity(member: _Member) -> str:
    pair = member.pair
    if pair is None:
        return "waiting"
    if pair.phase is Phase.NEGOTIATING and member.role not in pair.reported:
        return "loading"
    return {Phase.ALLOCATING: "allocating", Phase.SERVING: "ready", Phase.OVER: "alone"}.get(pair.phase, "negotiating")
