"""How many drafted tokens one request takes in a round: as many as it allows, and none while there is no draft.

vLLM 0.32 has one number for all. But its scheduler gives each request as many draft slots in the next step as its
`spec_token_ids` has entries, and its V2 runner takes batches whose requests differ in that. So the list is cut where
the scheduler has filled it: with placeholders in `AsyncScheduler._update_after_schedule`, with tokens in
`Scheduler.update_draft_token_ids`.
"""

from collections.abc import Iterable
from typing import Any, Final

from cluster.engine import draft_context

MAX_DRAFT_TOKENS: Final = "dspark_max_draft_tokens"
"""In a request's `SamplingParams.extra_args`: at most so many; 0 is no speculation."""


def install() -> None:
    """Let requests have fewer draft slots in this process; a second call changes nothing."""
    # Here, not above: vLLM imports this module while it is itself being imported.
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    after_schedule, update_drafts = AsyncScheduler._update_after_schedule, Scheduler.update_draft_token_ids
    if hasattr(update_drafts, "replaced"):
        return

    def update_after_schedule(scheduler: Any, scheduler_output: Any) -> None:
        after_schedule(scheduler, scheduler_output)
        _cut(scheduler, scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(scheduler: Any, draft_token_ids: Any) -> None:
        update_drafts(scheduler, draft_token_ids)
        _cut(scheduler, draft_token_ids.req_ids)

    update_draft_token_ids.replaced = update_drafts  # type: ignore[attr-defined]
    AsyncScheduler._update_after_schedule = update_after_schedule
    Scheduler.update_draft_token_ids = update_draft_token_ids


def _cut(scheduler: Any, request_ids: Iterable[str]) -> None:
    is_away = draft_context.is_away(scheduler)
    for request_id in request_ids:
        request = scheduler.requests.get(request_id)
        if request is not None and request.spec_token_ids:
            most = 0 if is_away else _most(request)
            request.spec_token_ids = request.spec_token_ids[:most]


def _most(request: Any) -> int | None:
    extra = None if request.sampling_params is None else request.sampling_params.extra_args
    return extra.get(MAX_DRAFT_TOKENS) if extra else None
