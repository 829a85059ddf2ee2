"""A typed client of the generation API, sync (`Client`) and async (`AsyncClient`).

with Client("127.0.0.1:50051") as client:
    for response in client.stream(Request(prompt=TextPrompt(text="Why is the sky blue?"))):
        print(response.choices[0].text, end="")
"""

from cluster.client.asynchronous import AsyncClient
from cluster.client.connection import ClientTls, Connection
from cluster.client.errors import GenerationError
from cluster.client.info import DraftInfo, ModelInfo, ReplicaInfo
from cluster.client.synchronous import Client
from cluster.serving.join import join_responses
from cluster.serving.types import (
    ChatMessage,
    ChatPrompt,
    ChoiceDelta,
    FinishReason,
    OutputOptions,
    Request,
    Response,
    Sampling,
    SpeculationOptions,
    Stopping,
    StructuredOutput,
    TextPrompt,
    TokenPrompt,
)

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "ChatPrompt",
    "ChoiceDelta",
    "Client",
    "ClientTls",
    "Connection",
    "DraftInfo",
    "FinishReason",
    "GenerationError",
    "ModelInfo",
    "OutputOptions",
    "ReplicaInfo",
    "Request",
    "Response",
    "Sampling",
    "SpeculationOptions",
    "Stopping",
    "StructuredOutput",
    "TextPrompt",
    "TokenPrompt",
    "join_responses",
]
