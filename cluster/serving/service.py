"""The GenerationService on grpc.aio: what each method answers, and how an error becomes a status."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

from dspark.v1 import generation_pb2 as pb
from dspark.v1 import generation_pb2_grpc as pb_grpc

from cluster.serving import logs, status, wire
from cluster.serving.engine import EngineDeadError, GenerationEngine
from cluster.serving.errors import RequestError, invalid, unavailable
from cluster.serving.limits import Limits
from cluster.serving.requests import Requests
from cluster.serving.router import Router

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationService(pb_grpc.GenerationServiceServicer):
    """One engine's requests as a gRPC service."""

    def __init__(self, engine: GenerationEngine, limits: Limits, *, replica: str) -> None:
        self._engine = engine
        self._limits = limits
        self._replica = replica
        self.requests = Requests(engine, limits)
        if isinstance(engine, Router):
            self.requests.metrics.follow_moves(lambda: engine.moves)

    # Written to, not yielded from: a call that is cancelled closes its generation at once, not when it is collected.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        async with self._answering("Generate", context) as answering:
            job = self.requests.enter(request)
            answering["request_id"] = job.request_id
            try:
                async with aclosing(self.requests.run(job)) as responses:
                    async for response in responses:
                        answering["completion_tokens"] = response.usage.completion_tokens
                        await context.write(wire.encode_response(response))
            finally:
                self.requests.leave(job)

    async def GenerateBatch(self, request: pb.GenerateBatchRequest, context: Any) -> pb.GenerateBatchResponse:
        async with self._answering("GenerateBatch", context) as answering:
            jobs = self.requests.enter_batch(request.requests)
            answering["request_ids"] = [job.request_id for job in jobs]
            try:
                responses = await self.requests.run_batch(jobs)
            finally:
                for job in jobs:
                    self.requests.leave(job)
            return pb.GenerateBatchResponse(responses=[wire.encode_response(response) for response in responses])

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with self._answering("Abort", context) as answering:
            if len(request.request_ids) > self._limits.max_abort_ids:
                raise invalid("request_ids", f"{len(request.request_ids):,}; at most {self._limits.max_abort_ids:,}")
            aborted = await self.requests.abort(request.request_ids)
            answering["aborted"] = aborted
            return pb.AbortResponse(aborted_request_ids=aborted)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        model, limits = self._engine.model, self._limits
        return pb.GetModelInfoResponse(
            model=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            has_chat_template=model.has_chat_template,
            default_sampling=wire.encode_sampling(model.default_sampling),
            draft=None
            if model.draft is None
            else pb.DraftInfo(
                model=model.draft.model,
                method=model.draft.method,
                num_speculative_tokens=model.draft.num_speculative_tokens,
            ),
            limits=pb.RequestLimits(
                max_message_bytes=limits.max_message_bytes,
                max_n=min(limits.max_n, limits.max_running),
                max_logprobs=model.max_logprobs,
                max_stop_strings=limits.max_stop_strings,
                max_stop_string_length=limits.max_stop_string_length,
                max_stop_token_ids=limits.max_stop_token_ids,
                max_logit_bias=limits.max_logit_bias,
                max_allowed_token_ids=limits.max_allowed_token_ids,
                max_bad_words=limits.max_bad_words,
                max_structured_output_bytes=limits.max_structured_output_bytes,
                max_regex_length=limits.max_regex_length,
                max_batch_requests=limits.max_batch_requests,
                max_running=limits.max_running,
                max_queued=limits.max_queued,
            ),
            unimplemented_fields=model.unimplemented_fields,
            vllm_version=model.vllm_version,
        )

    async def GetClusterInfo(self, request: pb.GetClusterInfoRequest, context: Any) -> pb.GetClusterInfoResponse:
        admission = self.requests.admission
        if isinstance(self._engine, Router):
            # Those that wait do so here, for whichever replica is free first.
            running = self._engine.running
            draining = self._engine.draining
            each = [
                self._describe(name, one, running[name], draining=name in draining)
                for name, one in self._engine.replicas.items()
            ]
        else:
            each = [self._describe(self._replica, self._engine, admission.running, admission.queued)]
        return pb.GetClusterInfoResponse(replicas=each)

    def _describe(
        self, name: str, engine: GenerationEngine, running: int, queued: int = 0, *, draining: bool = False
    ) -> pb.Replica:
        if engine.dead:
            state = pb.REPLICA_STATE_DEAD
        else:
            state = pb.REPLICA_STATE_DRAINING if draining or self.requests.draining else pb.REPLICA_STATE_READY
        return pb.Replica(name=name, state=state, running=running, queued=queued, kv_cache_usage=engine.kv_cache_usage)

    @asynccontextmanager
    async def _answering(self, method: str, context: Any) -> AsyncIterator[dict[str, Any]]:
        """Turn errors into statuses; count and log how the call ended. Yields fields for the log."""
        started, fields = time.monotonic(), dict[str, Any]()
        ended = "UNKNOWN"
        try:
            yield fields
            ended = "OK"
        except (RequestError, EngineDeadError) as error:
            refusal = error if isinstance(error, RequestError) else unavailable("there is no engine in service")
            ended = refusal.status.name
            fields["why"] = str(refusal)
            await status.abort(context, refusal)
        except asyncio.CancelledError:
            ended = "CANCELLED"  # or its deadline: gRPC doesn't say
            raise
        finally:
            seconds = time.monotonic() - started
            self.requests.metrics.ended(method, ended, seconds)
            logs.event("call ended", method=method, status=ended, seconds=round(seconds, 4), **fields)
