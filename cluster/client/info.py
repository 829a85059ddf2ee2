"""What a server says of itself."""

from dataclasses import dataclass

from dspark.v1 import generation_pb2 as pb

from cluster.serving.types import Sampling
from cluster.serving.wire import decode_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """The draft of a server."""

    model: str
    method: str
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model and what its server can do; `limits` by name."""

    model: str
    vocab_size: int
    max_model_len: int
    has_chat_template: bool
    default_sampling: Sampling
    draft: DraftInfo | None
    limits: dict[str, int]
    unimplemented_fields: tuple[str, ...]
    vllm_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """One target engine: `state` is starting, ready, draining or dead."""

    name: str
    state: str
    running: int
    queued: int
    kv_cache_usage: float


def decode_model(message: pb.GetModelInfoResponse) -> ModelInfo:
    draft = message.draft
    return ModelInfo(
        model=message.model,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        has_chat_template=message.has_chat_template,
        default_sampling=decode_sampling(message.default_sampling),
        draft=DraftInfo(model=draft.model, method=draft.method, num_speculative_tokens=draft.num_speculative_tokens)
        if message.HasField("draft")
        else None,
        limits={field.name: value for field, value in message.limits.ListFields()},
        unimplemented_fields=tuple(message.unimplemented_fields),
        vllm_version=message.vllm_version,
    )


def decode_replicas(message: pb.GetClusterInfoResponse) -> tuple[ReplicaInfo, ...]:
    return tuple(
        ReplicaInfo(
            name=each.name,
            state=pb.ReplicaState.Name(each.state).removeprefix("REPLICA_STATE_").lower(),
            running=each.running,
            queued=each.queued,
            kv_cache_usage=each.kv_cache_usage,
        )
        for each in message.replicas
    )
