"""Who may connect, and how: tokens, TLS, addresses, message sizes, pings, reflection."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.client import Client, ClientTls, Connection, GenerationError, Request, TokenPrompt
from cluster.errors import UserError
from cluster.serving.limits import Limits
from cluster.serving.service import SERVICE_NAME
from cluster.serving.settings import ServerSettings, TlsSettings, read_token
from tests.serving.certificates import Authority
from tests.serving.requests import greedy
from tests.unit.serving.conftest import DEADLINE_S, SERVING, Served, failing

TOKEN = "correct-horse"


def test_a_token_is_asked_of_all_but_health(start: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    served = start(token=read_token(tmp_path / "token"))
    address = served.server.address
    for token in (None, "", "wrong", f"{TOKEN}x", TOKEN[:-1]):
        with Client(Connection(address=address, token=token)) as client:
            assert failing(lambda: client.generate(greedy())).status is grpc.StatusCode.UNAUTHENTICATED
            assert failing(lambda: client.model_info()).status is grpc.StatusCode.UNAUTHENTICATED
    with Client(Connection(address=address, token=TOKEN)) as client:
        assert client.generate(greedy(max_tokens=2)).choices[0].text == "aa"
        assert client.model_info().model == "scripted"
    assert TOKEN not in repr(Connection(address=address, token=TOKEN))
    assert served.health(SERVICE_NAME) == SERVING
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            list(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    for bad in ("", "two words"):
        (tmp_path / "token").write_text(bad)
        with pytest.raises(UserError, match="no single ASCII word"):
            read_token(tmp_path / "token")


def test_tls_and_mutual_tls_let_in_whom_they_should(start: Callable[..., Served], tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    server, client = authority.issue("server"), authority.issue("client")
    stranger = other.issue("stranger")
    tls = TlsSettings(certificate=server.certificate, key=server.key)
    mutual = TlsSettings(certificate=server.certificate, key=server.key, client_ca=authority.certificate)

    def asks(served: Served, to: ClientTls | None) -> bool:
        connection = Connection(address=served.server.address, tls=to)
        with Client(connection) as caller:
            try:
                caller.model_info(timeout_s=3)
            except GenerationError as error:
                return error.status not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return True

    trusting = ClientTls(ca=authority.certificate)
    known = ClientTls(ca=authority.certificate, certificate=client.certificate, key=client.key)
    unknown = ClientTls(ca=authority.certificate, certificate=stranger.certificate, key=stranger.key)
    one_way, both_ways = start(tls=tls), start(tls=mutual)
    assert asks(one_way, trusting)
    assert not asks(one_way, None)
    assert not asks(one_way, ClientTls(ca=other.certificate))
    assert asks(both_ways, known)
    assert not asks(both_ways, trusting)
    assert not asks(both_ways, unknown)


def test_what_cannot_be_listened_on_or_read_is_said(start: Callable[..., Served], tmp_path: Path) -> None:
    taken = start(metrics_port=0)
    port = int(taken.server.address.rpartition(":")[2])
    with pytest.raises(UserError, match="choose another host or port"):
        start(port=port)
    with pytest.raises(UserError, match="metrics port"):
        start(metrics_port=taken.server.metrics_port)
    (tmp_path / "no.pem").write_text("no")
    with pytest.raises(UserError, match="it is no PEM file"):
        start(tls=TlsSettings(certificate=tmp_path / "no.pem", key=tmp_path / "no.pem"))
    with pytest.raises(UserError, match="it can't be read"):
        start(tls=TlsSettings(certificate=tmp_path / "absent", key=tmp_path / "absent"))


def test_only_this_machine_is_served_by_default(start: Callable[..., Served]) -> None:
    assert ServerSettings().is_loopback
    assert not ServerSettings(host="0.0.0.0").is_loopback
    assert start().server.address.startswith("127.0.0.1:")


def test_a_message_over_the_cap_is_refused(start: Callable[..., Served]) -> None:
    served = start(limits=Limits(max_message_bytes=2000))
    with Client(served.server.address) as client:
        refusal = failing(lambda: client.generate(Request(prompt=TokenPrompt(token_ids=(300,) * 2000))))
        assert refusal.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.generate(greedy(max_tokens=1)).choices[0].text == "a"


def test_a_client_may_ping_through_a_long_quiet_call(start: Callable[..., Served]) -> None:
    served = start()
    served.tell(served.engine.hold)
    # A second apart is what gRPC-Core allows. Each ping too soon is a strike, and by default three end a connection.
    options = [("grpc.keepalive_time_ms", 100), ("grpc.keepalive_permit_without_calls", 1)]
    options += [("grpc.http2.max_pings_without_data", 0), ("grpc.http2.min_time_between_pings_ms", 100)]
    with grpc.insecure_channel(served.server.address, options=options) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), stopping=pb.StoppingConditions(max_tokens=2))
        call = stub.GenerateBatch.future(pb.GenerateBatchRequest(requests=[request]), timeout=DEADLINE_S)
        with pytest.raises(grpc.FutureTimeoutError):
            call.result(timeout=4.5)
        served.tell(served.engine.go)
        assert call.result(timeout=DEADLINE_S).responses[0].choices[0].text == "aa"


def test_reflection_describes_the_service_to_those_who_have_no_proto(start: Callable[..., Served]) -> None:
    served = start()
    with grpc.insecure_channel(served.server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**fields: str) -> Any:
            return next(iter(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**fields)]))))

        names = {each.name for each in ask(list_services="").list_services_response.service}
        assert names == {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        found = ask(file_containing_symbol=SERVICE_NAME).file_descriptor_response.file_descriptor_proto
        file = descriptor_pb2.FileDescriptorProto.FromString(found[0])
        assert {method.name for method in file.service[0].method} >= {"Generate", "Abort"}
