"""The coordinator, event by event: no sockets, no clock."""

from dataclasses import replace

import pytest
from dspark.v1.control_pb2 import (
    Acceptance,
    ChannelAcceptance,
    ChannelOffer,
    Facts,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRequest,
    JoinResponse,
    LossReason,
    Ready,
    Refusal,
    Versions,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contract.contract import KVContract
from cluster.contract.facts import Role
from cluster.contract.policy import Policy
from cluster.control.refusals import MEMBER_ROLES
from cluster.control.settings import CoordinatorSettings
from cluster.control.state import PROTOCOL_VERSION, Coordinator, Output
from tests.control import CONTRACT, FACTS, SIZES

TARGET, DRAFT = 0, 1  # streams
DIGEST = CONTRACT.digest
UNKNOWN_FIELD = b"\xfa\x01\x03abc"  # 31, which is none yet


def hello(
    role: Role, *, incarnation: int = 1, name: str = "", protocol: int = PROTOCOL_VERSION, vllm: str = "0.32.0"
) -> Hello:
    return Hello(
        role=MEMBER_ROLES[role],
        name=name or role,
        incarnation=incarnation,
        versions=Versions(protocol=protocol, vllm=vllm),
        engine_sizes=SIZES if role == "target" else None,
    )


class Room:
    """A coordinator, and what each stream has been told since it was last looked at."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.coordinator = Coordinator(
            CoordinatorSettings(address="", policy=policy or Policy(), heartbeat_timeout_ms=2_000)
        )
        self.told: dict[int, list[JoinResponse]] = {}
        self.ended: set[int] = set()

    def say(self, stream: int, message: object, *, now_s: float = 0.0) -> "Room":
        name = "".join("_" + letter.lower() if letter.isupper() else letter for letter in type(message).__name__)[1:]
        return self.take(self.coordinator.receive(stream, JoinRequest(**{name: message}), now_s))

    def take(self, outputs: list[Output]) -> "Room":
        for output in outputs:
            assert output.stream not in self.ended, "told after its end"
            self.told.setdefault(output.stream, []).append(output.response)
            if output.is_last:
                self.ended.add(output.stream)
        return self

    def kinds(self, stream: int) -> list[str]:
        """Kinds of messages that the stream has been told, which are then forgotten."""
        return [response.WhichOneof("message") or "" for response in self.told.pop(stream, [])]

    def last(self, stream: int) -> JoinResponse:
        return self.told[stream][-1]


def facts(role: Role, *, epoch: int = 1, **changes: object) -> Facts:
    return Facts(epoch=epoch, json=replace(FACTS[role], **changes).to_json())


def room_at(phase: str, *, policy: Policy | None = None) -> Room:
    """A pair that has come so far: joined, agreed, allocating or serving."""
    room = Room(policy).say(TARGET, hello("target")).say(DRAFT, hello("draft"))
    steps = [
        ("joined", None),
        ("agreed", lambda role: facts(role)),
        ("allocating", lambda _: Acceptance(epoch=1, digest=DIGEST)),
        ("serving", lambda _: Ready(epoch=1, digest=DIGEST)),
    ]
    for name, message in steps:
        if message is not None:
            room.say(TARGET, message("target")).say(DRAFT, message("draft"))
        if name == phase:
            break
    room.told.clear()
    return room


PHASES = ("joined", "agreed", "allocating", "serving")


def test_two_members_go_through_every_phase_together() -> None:
    room = Room().say(TARGET, hello("target"))
    assert room.kinds(TARGET) == ["welcome"]
    room.say(DRAFT, hello("draft"))
    assert room.last(DRAFT).peer_joined.peer.engine_sizes == SIZES
    assert room.last(TARGET).peer_joined.epoch == room.last(DRAFT).peer_joined.epoch == 1
    assert (room.kinds(TARGET), room.kinds(DRAFT)) == (["peer_joined"], ["welcome", "peer_joined"])
    room.say(DRAFT, facts("draft"))
    assert not room.told
    room.say(TARGET, facts("target"))
    for stream in (TARGET, DRAFT):
        assert KVContract.from_json(room.last(stream).contract.json) == CONTRACT
        assert room.kinds(stream) == ["contract"]
    room.say(TARGET, Acceptance(epoch=1, digest=DIGEST))
    assert not room.told, "the barrier: nobody may allocate before both have accepted"
    room.say(DRAFT, Acceptance(epoch=1, digest=DIGEST))
    assert (room.kinds(TARGET), room.kinds(DRAFT)) == (["allocate"], ["allocate"])
    room.say(DRAFT, Ready(epoch=1, digest=DIGEST))
    assert not room.told
    room.say(TARGET, Ready(epoch=1, digest=DIGEST))
    assert (room.kinds(TARGET), room.kinds(DRAFT)) == (["paired"], ["paired"])
    room.say(TARGET, ChannelOffer(epoch=1)).say(DRAFT, ChannelAcceptance(epoch=1))
    assert (room.kinds(TARGET), room.kinds(DRAFT)) == (["channel_acceptance"], ["channel_offer"])


def test_sides_that_cant_be_a_pair_are_both_told_and_both_out() -> None:
    room = room_at("joined").say(DRAFT, facts("draft", vocab_size=7)).say(TARGET, facts("target"))
    for stream in (TARGET, DRAFT):
        refusal = room.last(stream).refusal
        assert (refusal.conflict.field, refusal.conflict.draft) == ("vocab_size", "7")
    assert room.ended == {TARGET, DRAFT}


def test_a_policy_decides() -> None:
    room = room_at("joined", policy=Policy(attention_backend="FLASHMLA"))
    room.say(DRAFT, facts("draft")).say(TARGET, facts("target"))
    assert room.last(TARGET).refusal == room.last(DRAFT).refusal
    assert room.last(TARGET).refusal.conflict.field == "attention_backend"


@pytest.mark.parametrize("document", ["", "{}", "[]", FACTS["target"].to_json(), "\u20ac" * 100])
def test_a_document_that_is_no_draft_ends_the_pair(document: str) -> None:
    room = room_at("joined").say(DRAFT, Facts(epoch=1, json=document))
    assert room.kinds(TARGET) == room.kinds(DRAFT) == ["refusal"]


@pytest.mark.parametrize("message", [Acceptance, Ready])
def test_another_digest_than_the_contracts_ends_the_pair(message: type) -> None:
    room = room_at("agreed" if message is Acceptance else "allocating")
    room.say(TARGET, message(epoch=1, digest=DIGEST)).say(DRAFT, message(epoch=1, digest="0f" * 32))
    for stream in (TARGET, DRAFT):
        assert "0f" * 32 in room.last(stream).refusal.what
        assert DIGEST in room.last(stream).refusal.reason


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("leaver", [TARGET, DRAFT])
def test_whose_peer_leaves_is_told(phase: str, leaver: int) -> None:
    room = room_at(phase).say(leaver, Goodbye())
    lost = room.last(1 - leaver).peer_lost
    assert (lost.reason, lost.name) == (LossReason.LOSS_REASON_LEFT, ("target", "draft")[leaver])
    assert leaver not in room.told
    assert not room.ended


@pytest.mark.parametrize("phase", PHASES)
def test_a_stream_that_breaks_is_a_loss_in_every_phase(phase: str) -> None:
    room = room_at(phase)
    room.take(room.coordinator.broken(DRAFT))
    assert room.last(TARGET).peer_lost.reason == LossReason.LOSS_REASON_STREAM_BROKEN
    room.told.clear()
    room.take(room.coordinator.broken(TARGET))
    assert not room.told


@pytest.mark.parametrize("phase", PHASES)
def test_who_gives_up_says_why_to_both(phase: str) -> None:
    why = Refusal(what="the draft", reason="it has no room", remedy="give it some")
    room = room_at(phase).say(DRAFT, Goodbye(refusal=why))
    assert room.last(TARGET).refusal == why
    assert room.ended == {TARGET, DRAFT}


@pytest.mark.parametrize("phase", PHASES)
def test_silence_is_noticed_after_the_timeout_and_not_before(phase: str) -> None:
    room = room_at(phase).say(TARGET, Heartbeat(), now_s=1.9)
    room.take(room.coordinator.expire(2.0))
    assert not room.told
    room.take(room.coordinator.expire(2.1))
    assert room.last(TARGET).peer_lost.reason == LossReason.LOSS_REASON_SILENT
    assert room.kinds(DRAFT) == ["refusal"]  # which it reads if it wakes up
    assert room.ended == {DRAFT}


def test_a_late_draft_is_paired_when_it_comes() -> None:
    room = Room().say(TARGET, hello("target"), now_s=0).say(TARGET, Heartbeat(), now_s=100)
    room.say(DRAFT, hello("draft"), now_s=101)
    assert room.kinds(TARGET) == ["welcome", "peer_joined"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_hello_on_one_stream_is_out_of_turn(phase: str) -> None:
    room = room_at(phase).say(DRAFT, hello("draft", incarnation=2))
    assert room.kinds(DRAFT) == ["refusal"]
    assert room.last(TARGET).peer_lost.reason == LossReason.LOSS_REASON_OUT_OF_TURN


@pytest.mark.parametrize("phase", PHASES)
def test_a_later_incarnation_takes_the_place_of_an_earlier_one(phase: str) -> None:
    room = room_at(phase).say(2, hello("draft", incarnation=2))
    assert room.kinds(2) == ["welcome"]
    assert "later incarnation" in room.last(DRAFT).refusal.reason
    assert room.last(TARGET).peer_lost.reason == LossReason.LOSS_REASON_SUPERSEDED
    room.told.clear()
    # What is still on its way from the earlier one reaches nobody; its target ends, and comes back.
    room.say(TARGET, Goodbye()).say(3, hello("target", incarnation=2))
    assert room.last(2).peer_joined.epoch == room.last(3).peer_joined.epoch == 2


@pytest.mark.parametrize(("incarnation", "name"), [(1, "draft"), (0, "draft"), (9, "another")])
def test_an_earlier_incarnation_or_another_process_finds_the_place_taken(incarnation: int, name: str) -> None:
    room = room_at("serving").say(2, hello("draft", incarnation=incarnation, name=name))
    assert "has the place of the draft already" in room.last(2).refusal.reason
    assert room.ended == {2}
    assert TARGET not in room.told


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Hello(), "control.proto"),
        (Hello(versions=Versions(protocol=PROTOCOL_VERSION)), "no role"),
        (Hello(role=MEMBER_ROLES["target"], versions=Versions(protocol=PROTOCOL_VERSION)), "without sizes"),
        (hello("draft", protocol=PROTOCOL_VERSION + 1), "control.proto"),
        (Facts(epoch=1), "hello comes first"),
        (Goodbye(), "hello comes first"),
    ],
)
def test_who_cant_join_is_turned_away_and_nobody_else_minds(wrong: object, said: str) -> None:
    room = room_at("agreed").say(2, wrong)
    assert said in room.last(2).refusal.reason
    assert room.ended == {2}
    assert not {TARGET, DRAFT} & room.told.keys()


def test_two_versions_of_vllm_are_refused_before_either_loads() -> None:
    room = Room().say(TARGET, hello("target")).say(DRAFT, hello("draft", vllm="0.33.0"))
    assert room.last(TARGET).refusal.conflict.field == "vllm_version"
    assert room.ended == {TARGET, DRAFT}


@pytest.mark.parametrize("phase", PHASES)
def test_a_message_of_another_epoch_is_dropped(phase: str) -> None:
    room = room_at(phase)
    for message in (facts("draft", epoch=2), Acceptance(digest=DIGEST), Ready(epoch=3), ChannelOffer(epoch=2)):
        room.say(DRAFT, message)
    assert not room.told
    assert not room.ended


@pytest.mark.parametrize("phase", PHASES)
def test_a_message_that_isnt_due_ends_its_senders_part(phase: str) -> None:
    due = {"joined": Facts, "agreed": Acceptance, "allocating": Ready, "serving": ChannelOffer | ChannelAcceptance}
    for message in (
        facts("draft"),
        Acceptance(epoch=1, digest=DIGEST),
        Ready(epoch=1, digest=DIGEST),
        ChannelOffer(epoch=1),
    ):
        if not isinstance(message, due[phase]):
            room = room_at(phase).say(DRAFT, message)
            assert room.kinds(DRAFT) == ["refusal"]
            assert room.last(TARGET).peer_lost.reason == LossReason.LOSS_REASON_OUT_OF_TURN


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("joined", facts("draft")),
        ("agreed", Acceptance(epoch=1, digest=DIGEST)),
        ("allocating", Ready(epoch=1, digest=DIGEST)),
    ],
)
def test_the_same_word_twice_is_no_second_side(phase: str, message: object) -> None:
    room = room_at(phase).say(DRAFT, message).say(DRAFT, message)
    assert room.kinds(DRAFT) == ["refusal"]
    assert room.kinds(TARGET) == ["peer_lost"]


def test_a_message_of_a_later_version_is_ignored() -> None:
    room = room_at("joined")
    unknown = JoinRequest.FromString(UNKNOWN_FIELD)
    room.take(room.coordinator.receive(DRAFT, unknown, 0.0)).take(room.coordinator.receive(7, unknown, 0.0))
    assert not room.told


MESSAGES = st.sampled_from(
    [
        hello("target"),
        hello("draft"),
        hello("target", incarnation=2),
        hello("draft", incarnation=2),
        facts("target"),
        facts("draft"),
        facts("draft", epoch=2),
        facts("target", epoch=2),
        facts("draft", vocab_size=7),
        *(
            kind(epoch=epoch, digest=digest)
            for kind in (Acceptance, Ready)
            for epoch in (1, 2)
            for digest in (DIGEST, "")
        ),
        ChannelOffer(epoch=1),
        ChannelAcceptance(epoch=1),
        Heartbeat(),
        Goodbye(),
        Goodbye(refusal=Refusal(what="it", reason="gives up", remedy="ask")),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), MESSAGES | st.just("broken")), max_size=25))
def test_whatever_comes_in_whatever_order(events: list[tuple[int, object]]) -> None:
    """Nobody is told anything after its end, nobody may allocate alone, and epochs only grow."""
    room, gone = Room(), set()
    allowed: dict[int, list[int]] = {}
    epochs = [0]
    for stream, event in events:
        if stream in gone | room.ended:
            continue  # as the service does
        if event == "broken":
            gone.add(stream)
            room.take(room.coordinator.broken(stream))
        else:
            room.say(stream, event)
        for told, responses in room.told.items():
            assert told not in gone
            for response in responses:
                if response.HasField("peer_joined"):
                    epochs.append(response.peer_joined.epoch)
                if response.HasField("allocate"):
                    allowed.setdefault(response.allocate.epoch, []).append(told)
        room.told.clear()
    assert epochs == sorted(epochs)
    assert all(len(set(streams)) == 2 for streams in allowed.values())
