"""Facts of a real target and a real draft, from their configs: without weights, and without allocating.

    target, draft = probe(ProbeRequest(role="target", ...), ProbeRequest(role="draft", ...))

A throw-away process builds the models, so that nothing of this one changes and vLLM isn't imported here. It answers for
the platform that it runs on. Facts that were read on a GPU can be saved (`SideFacts.to_json`) and negotiated anywhere.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.contract.codec import to_plain
from cluster.contract.facts import Role, SideFacts
from cluster.engine.version import require_supported_vllm
from cluster.errors import UserError

PROBE_TIMEOUT_S = 600
"""Importing vLLM takes 10 s, and a minute on a busy machine or the first time; then a second for each side. Whoever
waits longer than this waits for something that won't come, such as a file system that has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One side to build. `engine_args` are those of the engine with both models, as for `vllm.EngineArgs`, as plain
    data; a draft is probed with the same as its target. `model` is the side's name for people."""

    role: Role
    model: str
    engine_args: Mapping[str, Any]


def probe(*requests: ProbeRequest, show_log: bool = False, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[SideFacts, ...]:
    """The facts that were asked for, in order. With `show_log`, vLLM's log goes to standard error.

    Raises:
        UserError: this is another version of vLLM, or a model can't be built here, or not within `timeout_s`.
    """
    require_supported_vllm()
    command = [sys.executable, "-m", "cluster.contract.probe_process"]
    document = json.dumps({"sides": [to_plain(request) for request in requests]})
    try:
        process = subprocess.run(
            command,
            input=document,
            stdout=subprocess.PIPE,
            stderr=None if show_log else subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        names = ", ".join(request.model for request in requests)
        raise UserError(
            f"the probe of {names}", f"it has not ended after {timeout_s:.0f} s", "look at its log with --debug"
        ) from error
    if process.returncode != 0:
        last_words = (process.stderr or "").strip().rpartition("\n")[2]
        raise UserError(
            "the probe's process",
            last_words or f"it ended with exit code {process.returncode}",
            "look at its log with --debug",
        )
    return tuple(_facts(answer) for answer in json.loads(process.stdout)["sides"])


def _facts(answer: Mapping[str, Any]) -> SideFacts:
    if "error" in answer:
        raise UserError(**answer["error"])
    return SideFacts.from_json(answer["facts"])
