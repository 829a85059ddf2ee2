"""The service around a scripted engine, over real gRPC: places, statuses, health, tokens, TLS, limits, the end."""

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.client import Client, ClientTls, Connection, FinishReason, GenerationError, Request, Sampling, TokenPrompt
from cluster.errors import UserError
from cluster.serving import logs
from cluster.serving.limits import Limits
from cluster.serving.server import GenerationServer
from cluster.serving.service import SERVICE_NAME
from cluster.serving.settings import ServerSettings, TlsSettings, read_token
from tests.serving.certificates import Authority
from tests.serving.loop import LoopThread
from tests.serving.requests import greedy
from tests.serving.scripted_engine import ScriptedEngine

DEADLINE_S = 20
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
TOKEN = "correct-horse"


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


class Served:
    """A server of a scripted engine; calls into the engine are made in its loop."""

    def __init__(self, loop: LoopThread, settings: ServerSettings) -> None:
        self.loop = loop
        self.engine, self.server = loop.run(self._start(settings))

    async def _start(self, settings: ServerSettings) -> tuple[ScriptedEngine, GenerationServer]:
        engine = ScriptedEngine()
        server = GenerationServer(engine, settings, replica="replica-7")
        await server.start()
        return engine, server

    def tell(self, what: Callable[[], Any]) -> Any:
        async def told() -> Any:
            return what()

        return self.loop.run(told())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.tell(condition):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def health(self, service: str) -> int:
        with grpc.insecure_channel(self.server.address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S).status)


@pytest.fixture
def start(loop: LoopThread) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def one(**settings: Any) -> Served:
        started.append(Served(loop, ServerSettings(**{"port": 0, "drain_grace_s": 5.0} | settings)))
        return started[-1]

    yield one
    for served in started:
        served.tell(served.engine.go)
        loop.run(served.server.stop())


@pytest.fixture
def served(start: Callable[..., Served]) -> Served:
    return start(limits=Limits(max_running=2, max_queued=1))


def background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start the work in a thread; call what is returned for its result."""
    future: Future[Any] = Future()
    threading.Thread(target=lambda: future.set_result(work()), daemon=True).start()
    return lambda: future.result(DEADLINE_S)


def failing(call: Callable[[], Any]) -> GenerationError:
    with pytest.raises(GenerationError) as failure:
        call()
    return failure.value


def test_a_full_server_refuses_at_once_with_a_time_to_come_back(served: Served) -> None:
    served.tell(served.engine.hold)
    with Client(served.server.address) as client:
        streams = [client.stream(greedy(max_tokens=3, request_id=f"r{i}")) for i in range(3)]
        answers = [[next(stream)] for stream in streams[:2]]
        waiting = background(lambda: list(streams[2]))
        requests = served.server.service.requests
        served.wait_for(lambda: requests.admission.queued == 1)
        began = time.monotonic()
        refusal = failing(lambda: client.generate(greedy()))
        assert time.monotonic() - began < 1.0
        assert refusal.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s > 0
        assert served.tell(lambda: served.engine.running) == ["r0", "r1"]
        assert client.cluster_info()[0].queued == 1
        served.tell(served.engine.go)
        for answer, stream in zip(answers, streams[:2], strict=True):
            answer += list(stream)
        assert [len(answer) for answer in (*answers, waiting())] == [3, 3, 3]
    assert served.tell(lambda: requests.empty)


def test_a_cancelled_or_late_request_gives_its_place_back(served: Served) -> None:
    served.tell(served.engine.hold)
    requests = served.server.service.requests
    with Client(served.server.address) as client:
        stream = client.stream(greedy(request_id="cancelled"))
        next(stream)
        stream.close()
        served.wait_for(lambda: served.engine.closed == ["cancelled"])
        late = failing(lambda: client.generate(greedy(request_id="late"), timeout_s=0.3))
        assert late.status is grpc.StatusCode.DEADLINE_EXCEEDED
        served.wait_for(lambda: served.engine.closed == ["cancelled", "late"])
        held = [client.stream(greedy(request_id=f"held{i}")) for i in range(2)]
        for each in held:
            next(each)
        waited = failing(lambda: client.generate(greedy(request_id="waiting"), timeout_s=0.3))
        assert waited.status is grpc.StatusCode.DEADLINE_EXCEEDED
        served.wait_for(lambda: requests.admission.queued == 0)
        for each in held:
            each.close()
        served.wait_for(lambda: requests.empty)
    assert "waiting" not in served.engine.closed
    assert served.tell(lambda: requests.admission.running) == 0


def test_abort_ends_running_and_waiting_requests_and_is_idempotent(served: Served) -> None:
    served.tell(served.engine.hold)
    with Client(served.server.address) as client:
        streams = {name: client.stream(greedy(request_id=name)) for name in ("one", "two")}
        for stream in streams.values():
            next(stream)
        waiting = background(lambda: list(client.stream(greedy(request_id="waiting", sampling={"n": 1}))))
        served.wait_for(lambda: served.server.service.requests.admission.queued == 1)
        assert client.abort(["waiting", "nobody", "waiting"]) == ["waiting"]
        assert [choice.finish_reason for choice in waiting()[-1].choices] == [FinishReason.ABORTED]
        assert client.abort(["one", "two", "one"]) == ["one", "two"]
        for stream in streams.values():
            assert [choice.finish_reason for choice in list(stream)[-1].choices] == [FinishReason.ABORTED]
        assert client.abort(["one"]) == []
        too_many = failing(lambda: client.abort([str(i) for i in range(1025)]))
        assert (too_many.status, too_many.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_ids")


def test_an_id_names_one_request_at_a_time(served: Served) -> None:
    served.tell(served.engine.hold)
    with Client(served.server.address) as client:
        stream = client.stream(greedy(request_id="same"))
        next(stream)
        assert failing(lambda: client.generate(greedy(request_id="same"))).status is grpc.StatusCode.ALREADY_EXISTS
        stream.close()
        served.wait_for(lambda: served.engine.closed == ["same"])
        served.tell(served.engine.go)
        assert client.generate(greedy(request_id="same")).request_id == "same"
        assert client.generate(greedy()).request_id != client.generate(greedy()).request_id


def test_a_batch_with_one_wrong_request_is_refused_by_its_path(served: Served) -> None:
    with Client(served.server.address) as client:
        right, wrong = greedy(), greedy(sampling={"top_p": 7.0})
        refusal = failing(lambda: client.generate_batch([right, wrong]))
        assert (refusal.status, refusal.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "requests[1].sampling.top_p",
        )
        assert failing(lambda: client.generate_batch([])).field == "requests"
        assert failing(lambda: client.generate_batch([right] * 4)).field == "requests"
        twice = failing(lambda: client.generate_batch([greedy(request_id="x")] * 2))
        assert twice.status is grpc.StatusCode.ALREADY_EXISTS
        long = failing(lambda: client.generate_batch([right, greedy(tuple(range(250)), 50)]))
        assert long.field == "requests[1].stopping.max_tokens"
        assert [len(answer.choices) for answer in client.generate_batch([right] * 3)] == [1, 1, 1]
    served.wait_for(lambda: served.server.service.requests.empty)


def test_a_dead_engine_is_unavailable_and_not_ready_but_the_process_lives(served: Served) -> None:
    seen: list[int] = []
    served.tell(served.engine.hold)
    with grpc.insecure_channel(served.server.address) as channel, Client(served.server.address) as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        seen.append(next(watch).status)
        stream = client.stream(greedy(max_tokens=3))
        next(stream)
        served.tell(served.engine.die)
        assert failing(lambda: list(stream)).status is grpc.StatusCode.UNAVAILABLE
        assert failing(lambda: client.generate(greedy())).status is grpc.StatusCode.UNAVAILABLE
        seen.append(next(watch).status)
        watch.cancel()
        assert client.cluster_info()[0].state == "dead"
        served.loop.run(served.server.wait_until_dead())
    assert seen == [SERVING, NOT_SERVING]
    assert served.health("") == SERVING


def test_the_end_is_orderly(start: Callable[..., Served], loop: LoopThread) -> None:
    served = start()
    served.tell(served.engine.hold)
    with grpc.insecure_channel(served.server.address) as channel, Client(served.server.address) as client:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert next(watch).status == SERVING
        stream = client.stream(greedy(max_tokens=3))
        parts = [next(stream)]
        stopping = background(lambda: loop.run(served.server.stop()))
        assert next(watch).status == NOT_SERVING
        assert failing(lambda: client.generate(greedy())).status is grpc.StatusCode.UNAVAILABLE
        served.tell(served.engine.go)
        parts += list(stream)  # what ran goes on to its end
        watch.cancel()
    stopping()
    assert [part.choices[0].finish_reason for part in parts] == [None, None, FinishReason.LENGTH]


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


def test_the_server_says_what_it_is(served: Served) -> None:
    with Client(served.server.address) as client:
        info = client.model_info()
        assert (info.model, info.vocab_size, info.draft) == ("scripted", 512, None)
        assert info.default_sampling == Sampling(n=1, temperature=0.0, top_p=0.9)
        assert info.limits["max_running"] == 2
        assert info.limits["max_n"] == 2
        assert info.unimplemented_fields == ("priority",)
        (replica,) = client.cluster_info()
        assert (replica.name, replica.state, replica.running, replica.kv_cache_usage) == ("replica-7", "ready", 0, 0.25)


def test_calls_are_counted_and_logged_with_their_id_but_without_their_text(
    start: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.LOGGER)
    served = start(metrics_port=0)
    with Client(served.server.address) as client:
        client.generate(greedy(request_id="seen", max_tokens=2))
        failing(lambda: client.generate(greedy(sampling={"top_p": 7.0})))
    with urllib.request.urlopen(f"http://127.0.0.1:{served.server.metrics_port}/metrics") as page:
        figures = page.read().decode()
    assert 'dspark_grpc_requests_total{method="Generate",status="OK"} 1.0' in figures
    assert 'dspark_grpc_requests_total{method="Generate",status="INVALID_ARGUMENT"} 1.0' in figures
    assert "dspark_queued_choices 0.0" in figures
    lines = [json.loads(logs.JsonFormatter("replica-7").format(record)) for record in caplog.records]
    ended = [line for line in lines if line["event"] == "call ended"]
    assert [line["status"] for line in ended] == ["OK", "INVALID_ARGUMENT"]
    assert (ended[0]["request_id"], ended[0]["completion_tokens"], ended[0]["replica"]) == ("seen", 2, "replica-7")
    assert ended[1]["why"].startswith("sampling.top_p: ")
