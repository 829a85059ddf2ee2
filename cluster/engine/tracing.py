"""What each process did when: a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A trace is torch's: operators, kernels, and ranges of our own names. Those of both processes become one file, by the
one clock that they have on a host.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

_RANGES_VARIABLE: Final = "VLLM_CUSTOM_SCOPES_FOR_PROFILING"
_POLL_S: Final = 0.05
_BASE: Final = "baseTimeNanoseconds"
"""What `ts`, in microseconds, counts from."""


def enable_ranges() -> None:
    """Of this process and its children, before vLLM is imported: without it `range_of` costs next to nothing."""
    os.environ[_RANGES_VARIABLE] = "1"


def range_of(name: str) -> AbstractContextManager[Any]:
    """A range of the trace, if there is one."""
    from vllm.v1.utils import record_function_or_nullcontext

    context: AbstractContextManager[Any] = record_function_or_nullcontext(f"dspark: {name}")
    return context


@contextmanager
def traced(path: Path | None, process: str) -> Iterator[None]:
    """Write what this thread and the GPU do in the block to `path`; nothing, if that is None. It is all held in
    memory until the end."""
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile, supported_activities

    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    with profile(activities=list(activities)) as profiler:
        yield
    unfinished = path.with_name(f"{path.name}.part")
    profiler.export_chrome_trace(str(unfinished))
    trace = json.loads(unfinished.read_bytes())
    for event in trace["traceEvents"]:
        if event.get("name") == "process_name" and event["pid"] == os.getpid():
            event["args"]["name"] = process
    unfinished.write_text(json.dumps(trace), encoding="utf-8")
    unfinished.rename(path)


def await_trace(path: Path, timeout_s: float) -> None:
    """Until another process has written it, or some time has passed: it may have none to write."""
    end_s = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def join_traces(parts: Sequence[Path], path: Path) -> None:
    """One trace out of those of several processes of this host."""
    traces = [json.loads(part.read_bytes()) for part in parts]
    base = min(trace[_BASE] for trace in traces)
    events = []
    for trace in traces:
        later_us = (trace[_BASE] - base) / 1000
        events += [event | {"ts": event["ts"] + later_us} if "ts" in event else event for event in trace["traceEvents"]]
    path.write_text(json.dumps(traces[0] | {_BASE: base, "traceEvents": events}), encoding="utf-8")
