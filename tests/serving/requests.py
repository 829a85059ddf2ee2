"""Requests that several tests send, for the tiny target and for the service."""

from typing import Any

from cluster.client import OutputOptions, Request, Sampling, SpeculationOptions, Stopping, StructuredOutput, TokenPrompt
from cluster.engine.in_process import GenerationRequest

SHORT, MEDIUM = tuple(range(7, 11)), tuple(range(40, 73))


def greedy(
    prompt: tuple[int, ...] = SHORT,
    max_tokens: int = 12,
    *,
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    speculation: dict[str, Any] | None = None,
    structured_output: StructuredOutput | None = None,
    **more: Any,
) -> Request:
    return Request(
        prompt=TokenPrompt(token_ids=prompt),
        sampling=Sampling(**{"temperature": 0.0} | (sampling or {})),
        stopping=Stopping(**{"max_tokens": max_tokens, "ignore_eos": True} | (stopping or {})),
        output=OutputOptions(**output or {}),
        speculation=SpeculationOptions(**speculation or {}),
        structured_output=structured_output,
        **more,
    )


def alone_request(prompt: tuple[int, ...] = SHORT, max_tokens: int = 12, **more: Any) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **more)
