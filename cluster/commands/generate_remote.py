"""`dspark-cluster generate --address HOST:PORT`: one prompt, answered by a server."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from cluster.client import (
    ChatMessage,
    ChatPrompt,
    Client,
    ClientTls,
    Connection,
    GenerationError,
    ModelInfo,
    Request,
    Response,
    Sampling,
    SpeculationOptions,
    Stopping,
    TextPrompt,
    join_responses,
)
from cluster.commands.generate import GenerateOptions, GenerateResult
from cluster.commands.terminal import messages
from cluster.errors import UserError
from cluster.serving.settings import read_token

_SEED_BITS: Final = 64
_MAX_TOKENS_BITS: Final = 32
"""Of the fields of a request; what the server and its model can do with them, it says itself."""

INFO_TIMEOUT_S: Final = 30.0
"""For the first call, which has a connection to make; without it an address that swallows packets holds forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Where the server is and what it asks for, as the command line gives it."""

    address: str
    tls: bool = False
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    def connection(self) -> Connection:
        """Raises UserError for an address or a file that can't be used."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--address {self.address}", "it is not HOST:PORT", "give both, like 127.0.0.1:50051")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UserError("--tls-certificate and --tls-key", "only one is given", "give both, or neither")
        tls = ClientTls(ca=self.tls_ca, certificate=self.tls_certificate, key=self.tls_key)
        return Connection(
            address=self.address,
            tls=tls if self.tls or tls != ClientTls() else None,
            token=None if self.token_file is None else read_token(self.token_file),
        )


def generate_remote(remote: RemoteOptions, options: GenerateOptions) -> GenerateResult:
    """Print the answer's text as it comes, then its figures. Raises UserError for whatever the server refuses."""
    result = answer_remote(remote, options, stream=not options.json_output)
    if options.json_output:
        print(json.dumps(result.to_json()))
    else:
        messages.print(result.summary(), style="dim", soft_wrap=True)
    return result


def answer_remote(
    remote: RemoteOptions, options: GenerateOptions, *, stream: bool, speculate: bool | None = None
) -> GenerateResult:
    """The server's answer; `stream` prints the text as it comes, `speculate` None leaves drafts to the server.

    Raises:
        UserError: the server refuses it, or it can't be asked.
    """
    _check_sizes(options)
    with Client(remote.connection()) as client:
        try:
            return _answer(client, options, stream, speculate)
        except GenerationError as error:
            raise user_error(remote.address, error) from error


def _check_sizes(options: GenerateOptions) -> None:
    for flag, value, bits in (
        ("--seed", options.seed, _SEED_BITS),
        ("--max-tokens", options.max_tokens, _MAX_TOKENS_BITS),
    ):
        if value is not None and not 0 <= value < 1 << bits:
            raise UserError(f"{flag} {value}", f"a request holds 0 to {(1 << bits) - 1:,}", "choose one of these")


def _answer(client: Client, options: GenerateOptions, stream: bool, speculate: bool | None) -> GenerateResult:
    chat = client.model_info().has_chat_template if options.chat is None else options.chat
    said = ChatPrompt(messages=(ChatMessage(role="user", content=options.prompt),))
    request = Request(
        prompt=said if chat else TextPrompt(text=options.prompt),
        sampling=Sampling(temperature=options.temperature, seed=options.seed),
        stopping=Stopping(max_tokens=options.max_tokens),
        speculation=SpeculationOptions(enabled=speculate),
    )
    start = time.perf_counter()
    responses: list[Response] = []
    for response in client.stream(request):
        responses.append(response)
        if stream:
            print("".join(choice.text for choice in response.choices), end="", flush=True)
    seconds = time.perf_counter() - start
    if stream:
        print(flush=True)
    answer = join_responses(responses)
    (choice,) = answer.choices
    return GenerateResult(
        text=choice.text,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        num_prompt_tokens=answer.usage.prompt_tokens,
        seconds=seconds,
        seed=answer.seed,
        acceptance=None if choice.speculation is None else choice.speculation.acceptance,
    )


def ask_model(connection: Connection) -> ModelInfo:
    """What a server serves. Raises UserError where it doesn't answer."""
    with Client(connection) as client:
        try:
            return client.model_info(timeout_s=INFO_TIMEOUT_S)
        except GenerationError as error:
            raise user_error(connection.address, error) from error


def user_error(address: str, error: GenerationError) -> UserError:
    """What the user of this server can do about a call that failed."""
    match error.status:
        case grpc.StatusCode.UNAVAILABLE:
            remedy = "check the address, TLS, and that the server is ready"
        case grpc.StatusCode.UNAUTHENTICATED:
            remedy = "give the server's token with --token-file"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            remedy = "try again later"
        case _:
            remedy = "change the request"
    return UserError(f"server {address}", f"{error.status.name}, {' '.join(error.details.split())}", remedy)
