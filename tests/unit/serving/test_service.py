"""Places, statuses, health and the end of a service around a scripted engine."""

import json
import logging
import time
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import Client, FinishReason, Sampling
from cluster.serving import logs
from cluster.serving.limits import Limits
from cluster.serving.router import Router
from cluster.serving.server import GenerationServer
from cluster.serving.service import SERVICE_NAME
from cluster.serving.settings import ServerSettings
from tests.serving.loop import LoopThread
from tests.serving.requests import greedy
from tests.serving.scripted_engine import ScriptedEngine
from tests.unit.serving.conftest import NOT_SERVING, NOT_SERVING_BAR_S, SERVING, Served, background, failing


@pytest.fixture
def served(start: Callable[..., Served]) -> Served:
    return start(limits=Limits(max_running=2, max_queued=1))


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
        other = greedy((1, 2), request_id="same")
        assert failing(lambda: client.generate(other)).status is grpc.StatusCode.ALREADY_EXISTS
        stream.close()
        served.wait_for(lambda: served.engine.closed == ["same"])
        served.tell(served.engine.go)
        assert client.generate(greedy(request_id="same")).request_id == "same"
        assert client.generate(greedy()).request_id != client.generate(greedy()).request_id


def test_a_request_that_is_repeated_takes_the_first_ones_place(served: Served) -> None:
    """Its client has lost the connection, and can't tell whether the server knows."""
    served.tell(served.engine.hold)
    with Client(served.server.address) as client:
        first = client.stream(greedy(request_id="same"))
        next(first)
        second = client.stream(greedy(request_id="same"))
        next(second)
        assert [choice.finish_reason for choice in list(first)[-1].choices] == [FinishReason.ABORTED]
        assert served.engine.running == ["same"]
        served.tell(served.engine.go)
        assert [choice.finish_reason for choice in list(second)[-1].choices] == [FinishReason.LENGTH]
    served.wait_for(lambda: served.server.service.requests.empty)


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


def test_a_server_whose_last_replica_is_drained_is_not_ready_at_once(loop: LoopThread) -> None:
    router = Router({"target-0": ScriptedEngine()})
    settings = ServerSettings(port=0)

    async def started() -> GenerationServer:
        server = GenerationServer(router, settings)
        await server.start()
        return server

    server = loop.run(started())
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert next(watch).status == SERVING
        asked = time.monotonic()
        loop.run(router.drain("target-0", 0.0))
        assert next(watch).status == NOT_SERVING
        took_s = time.monotonic() - asked
        print(f"not ready {1e3 * took_s:.0f} ms after the drain")
        assert took_s < NOT_SERVING_BAR_S
        router.resume("target-0")
        assert next(watch).status == SERVING
        watch.cancel()
    loop.run(server.stop())


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
