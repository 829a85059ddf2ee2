"""The probe's throw-away process: requests on standard input, facts on standard output, both JSON (see `probe`).

vLLM is imported once, and each side is built in a fork of its own, so that its config, its globals and whatever its
constructors do to them end with it. Models are built on the meta device, where a tensor has a shape and no memory.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from cluster.contract.facts import SideFacts
from cluster.engine.cpu import profile
from cluster.errors import UserError


def main() -> None:
    """Answer one document of requests, in their order."""
    answers = _take_standard_output()
    profile.activate()
    from cluster.contract import build_side  # noqa: F401 - for the forks: torch and vLLM take most of a probe's time

    requests: list[dict[str, Any]] = json.load(sys.stdin)["sides"]
    json.dump({"sides": [_answer_in_fork(request) for request in requests]}, answers)
    answers.flush()


def _take_standard_output() -> TextIO:
    """Keep standard output for the answers: what libraries print goes to standard error from here on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _answer_in_fork(request: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="dspark-probe-") as scratch, receiver:
        side = context.Process(target=_answer, args=(request, sender, Path(scratch)), name=f"probe-{request['role']}")
        side.start()
        sender.close()  # so that the fork's death ends the pipe
        try:
            answer: dict[str, Any] = json.loads(receiver.recv_bytes())
        except EOFError:
            answer = {}
        side.join()
        log = (Path(scratch) / "log").read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(log)
        return answer or _died(request, side.exitcode, log)


def _answer(request: dict[str, Any], sender: Connection, scratch: Path) -> None:
    """In the fork. What vLLM raises of its own ends it with a traceback, of which `_died` takes the last line."""
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    from cluster.contract.build_side import build_side
    from cluster.contract.read_side import read_side

    try:
        facts: SideFacts = read_side(
            build_side(request["role"], request["model"], request["engine_args"], scratch=scratch)
        )
        answer: dict[str, Any] = {"facts": facts.to_json()}
    except UserError as error:
        answer = {"error": {"what": error.what, "why": error.why, "remedy": error.remedy}}
    sender.send_bytes(json.dumps(answer).encode())


def _died(request: dict[str, Any], exit_code: int | None, log: str) -> dict[str, Any]:
    lines = [line for line in log.splitlines() if line.strip()]
    why = lines[-1] if exit_code == 1 and lines else f"its process ended with exit code {exit_code}"
    return {
        "error": {
            "what": f"vLLM can't build the {request['role']} {request['model']} here",
            "why": why,
            "remedy": "take a model that this platform runs, or read its facts elsewhere (--save-facts, --facts); "
            "--debug shows where",
        }
    }


if __name__ == "__main__":
    main()
