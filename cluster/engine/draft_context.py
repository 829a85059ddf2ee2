"""Which draft has the context of the requests that a step runs: what worker and scheduler tell each other about it.

A draft's KV cache is one incarnation's. What the target computes while there is none, or another, is missing in it: a
block that was cached then must not be found later, and a request that runs must be computed again. The scheduler knows
of blocks and requests, the worker of drafts, and each is one or two steps ahead of the other. So each says on what
passes between them anyway which epoch it means, 0 for none:

    worker → scheduler   on ModelRunnerOutput: the epoch of the draft that there is, or would be
    scheduler → worker   on SchedulerOutput: the epoch in which all requests of this step were computed

A new epoch empties the prefix cache and preempts what runs, which is then prefilled again, in the new draft's presence.
That is exact whatever the draft, it costs one prefill, and it brings a long request's acceptance back; a hole in the
draft's context would cost acceptance until the request's end. In epoch 0 no request has draft slots.
"""

from typing import Any, Final

_ATTRIBUTE: Final = "dspark_draft_epoch"
"""Both are plain dataclasses, which vLLM carries between its processes whole."""


def install() -> None:
    """Let this process's scheduler follow its target's draft; a second call changes nothing."""
    # Here, not above: vLLM imports this module while it is itself being imported.
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, update_from_output = Scheduler.schedule, Scheduler.update_from_output
    if hasattr(schedule, "replaced"):
        return

    def schedule_in_epoch(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        setattr(output, _ATTRIBUTE, _of(scheduler).computed)
        return output

    def update_and_follow(scheduler: Any, scheduler_output: Any, model_output: Any) -> Any:
        by_client = update_from_output(scheduler, scheduler_output, model_output)
        reported: int | None = getattr(model_output, _ATTRIBUTE, None)
        if reported is not None and _of(scheduler).follow(reported):
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return by_client

    schedule_in_epoch.replaced = schedule  # type: ignore[attr-defined]
    Scheduler.schedule = schedule_in_epoch
    Scheduler.update_from_output = update_and_follow


class Followed:
    """A scheduler's view of its draft. Pure, so that its order of events can be tested."""

    def __init__(self) -> None:
        self.computed: int | None = None
        """The epoch in which requests and cached blocks were computed; None before the first report."""
        self.is_there = True
        """Whether the draft of that epoch was there at the last report."""

    def follow(self, reported: int) -> bool:
        """A step's report. True where all that was computed is to be computed again."""
        self.is_there = reported != 0
        if reported in (0, self.computed):
            return False
        is_first, self.computed = self.computed is None, reported
        return not is_first


def is_away(scheduler: Any) -> bool:
    """Whether a request's draft slots would be for nothing."""
    return not _of(scheduler).is_there


def computed_in(scheduler_output: Any) -> int | None:
    """For the worker. None before the scheduler has heard of any draft."""
    epoch: int | None = getattr(scheduler_output, _ATTRIBUTE, None)
    return epoch


def report(model_output: Any, epoch: int) -> None:
    """For the worker, on a model's output that is there."""
    setattr(model_output, _ATTRIBUTE, epoch)


def _of(scheduler: Any) -> Followed:
    followed: Followed = scheduler.__dict__.setdefault("dspark_followed", Followed())
    return followed
