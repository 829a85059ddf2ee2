"""Speculation figures on every output of vLLM's scheduler, not only on a request's last one.

vLLM 0.32 counts each request's rounds as they happen (`Scheduler.update_from_output`), but sends the counts with the
last output. With `per_request_spec_decode_metrics="summary"` they are a histogram of K + 1 numbers, cheap enough to be
sent each step.
"""

from typing import Any, Final

LEVEL: Final = "summary"
"""The engine's `per_request_spec_decode_metrics` for which the figures are sent each step."""


def install() -> None:
    """Put the counts on every output in this process; a second call changes nothing."""
    # Here, not above: vLLM imports this module while it is itself being imported.
    from vllm.v1.core.sched.scheduler import Scheduler

    vllms_own = Scheduler.update_from_output
    if hasattr(vllms_own, "replaced"):
        return

    def update_from_output(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        by_client = vllms_own(scheduler, *args, **kwargs)
        if scheduler.spec_decode_metrics_level == LEVEL:
            for outputs in by_client.values():
                _add_figures(scheduler.requests, outputs.outputs)
        return by_client

    update_from_output.replaced = vllms_own  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output


def _add_figures(requests: Any, outputs: Any) -> None:
    for output in outputs:
        request = requests.get(output.request_id)
        if request is not None and output.spec_decode_metrics is None:
            output.spec_decode_metrics = request.spec_decode_metrics
