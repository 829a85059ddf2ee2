"""Which draft has the context of the requests that a step runs: what worker and scheduler tell each other about it.

A draft's KV cache is one incarnation's. What the target computes while there is none, or another, is missing in it: a
block that was cached then must not be found later, and a request that runs must be computed again. The scheduler knows
of blocks and requests, the worker of drafts, and each is one or two steps ahead of the other. So each says on what
passes between them anyway which epoch it means:

    worker → scheduler   on ModelRunnerOutput: the epoch of the draft that there is, or would be, 0 for none
    scheduler → worker   on SchedulerOutput: the epoch in which all requests of this step were computed, 0 to ask none

A new epoch empties the prefix cache and preempts what runs, which is then prefilled again, in the new draft's presence.
That is exact whatever the draft, it costs one prefill, and it brings a long request's acceptance back; a hole in the
draft's context would cost acceptance until the request's end. The same ends a rest that a draft which doesn't pay has
(`Budget`). Without a draft, or while it rests, no request has draft slots.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cluster.speculation.budget import Budget, Switch
from cluster.speculation.settings import REMOTE_DRAFT, remote_draft_settings

log = logging.getLogger(__name__)

_ATTRIBUTE: Final = "dspark_draft"
"""Both are plain dataclasses, which vLLM carries between its processes whole."""

RESUMES_AFTER: Final = 16
"""Steps of a size for which drafts pay: a batch whose size goes up and down isn't prefilled again each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReport:
    """What a step's worker knows of the draft."""

    epoch: int
    """0 while there is none."""
    asked: bool
    """Whether this step asked it."""
    round_s: float | None
    """What it was waited for, in this step or in the last like it; None where it wasn't, or that isn't known."""


def install() -> None:
    """Let this process's scheduler follow its target's draft; a second call changes nothing."""
    # Here, not above: vLLM imports this module while it is itself being imported.
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, update_from_output = Scheduler.schedule, Scheduler.update_from_output
    if hasattr(schedule, "replaced"):
        return

    def schedule_in_epoch(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.monotonic()
        output = schedule(scheduler, *args, **kwargs)
        setattr(output, _ATTRIBUTE, (_of(scheduler).asked, begun_s))
        return output

    def update_and_follow(scheduler: Any, scheduler_output: Any, model_output: Any) -> Any:
        by_client = update_from_output(scheduler, scheduler_output, model_output)
        report: DraftReport | None = getattr(model_output, _ATTRIBUTE, None)
        if report is not None:
            followed = _of(scheduler)
            if (tokens := _decoded(scheduler, scheduler_output, model_output)) is not None:
                begun_s = getattr(scheduler_output, _ATTRIBUTE)[1]
                followed.observe(len(model_output.req_ids), tokens, begun_s, report)
            if followed.follow(report.epoch, len(scheduler.running)):
                scheduler.reset_prefix_cache(reset_running_requests=True)
        return by_client

    schedule_in_epoch.replaced = schedule  # type: ignore[attr-defined]
    Scheduler.schedule = schedule_in_epoch
    Scheduler.update_from_output = update_and_follow


class Followed:
    """A scheduler's view of its draft. Knows nothing of vLLM, so that its order of events can be tested."""

    def __init__(self, *, may_rest: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._may_rest = may_rest
        self._clock = clock
        self.computed: int | None = None
        """The epoch in which requests and cached blocks were computed; None before the first report."""
        self.is_there = True
        """Whether the draft of that epoch was there at the last report."""
        self.rests = False
        self._budget = Budget(clock)
        self._steps_that_pay = 0
        self._last_update_s = 0.0

    @property
    def asked(self) -> int | None:
        """The epoch that a step is to ask for drafts: 0 for none, None for whichever is the first."""
        return 0 if self.rests else self.computed

    def follow(self, reported: int, num_running: int = 0) -> bool:
        """A step's report, and the requests that run. True where all that was computed is to be computed again."""
        self.is_there = reported != 0
        resumes = self._rest_or_resume(num_running)
        if reported in (0, self.computed):
            return resumes and self.is_there
        is_first, self.computed = self.computed is None, reported
        return not is_first

    def observe(self, num_reqs: int, num_tokens: int, begun_s: float, report: DraftReport) -> None:
        """A step in which all requests decoded."""
        if not self._may_rest:
            return
        now_s = self._clock()
        # Steps may overlap: then it took as long as the results are apart.
        step_s = now_s - max(begun_s, self._last_update_s)
        self._last_update_s = now_s
        if report.asked and report.round_s is None:
            return  # it is neither a plain step, nor can be made one by taking its round away
        if (switch := self._budget.observe(num_reqs, num_tokens, step_s, report.round_s)) is not None:
            _tell(switch)

    def _rest_or_resume(self, num_running: int) -> bool:
        if not num_running or not self._may_rest:
            return False
        if self._budget.rests(num_running):
            self.rests, self._steps_that_pay = True, 0
            return False
        self._steps_that_pay += 1
        if not self.rests or self._steps_that_pay < RESUMES_AFTER:
            return False
        self.rests = False
        return True


def is_away(scheduler: Any) -> bool:
    """Whether a request's draft slots would be for nothing."""
    followed = _of(scheduler)
    return followed.rests or not followed.is_there


def asked_epoch(scheduler_output: Any) -> int | None:
    """For the worker: 0 to ask no draft, None before the scheduler has heard of any."""
    epoch: int | None = getattr(scheduler_output, _ATTRIBUTE, (None, 0.0))[0]
    return epoch


def report(model_output: Any, of_draft: DraftReport) -> None:
    """For the worker, on a model's output that is there."""
    setattr(model_output, _ATTRIBUTE, of_draft)


def _decoded(scheduler: Any, scheduler_output: Any, model_output: Any) -> int | None:
    """The tokens of a step in which every request decoded."""
    most = 1 + scheduler.num_spec_tokens
    if not model_output.sampled_token_ids or max(scheduler_output.num_scheduled_tokens.values()) > most:
        return None
    counts = [len(tokens) for tokens in model_output.sampled_token_ids]
    return sum(counts) if all(counts) else None


def _of(scheduler: Any) -> Followed:
    if not hasattr(scheduler, "dspark_followed"):
        more = scheduler.vllm_config.additional_config or {}
        scheduler.dspark_followed = Followed(
            may_rest=REMOTE_DRAFT in more and remote_draft_settings(more).rest_slow_drafts
        )
    followed: Followed = scheduler.dspark_followed
    return followed


def _tell(switch: Switch) -> None:
    what = "drafts pay again" if switch.drafts else "drafts don't pay and rest"
    log.warning("%s, for up to %d requests: %.2f of a plain step's time a token", what, switch.num_reqs, switch.ratio)
