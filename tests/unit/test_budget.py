"""When drafts don't pay they rest, for batches of that size, and are tried again later; what is between stays."""

from cluster.engine.draft_context import RESUMES_AFTER, DraftReport, Followed
from cluster.speculation.budget import FIRST_REST_S, Budget, Switch
from cluster.speculation.pace import Pace

STEP_S = 0.1


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(budget: Budget, steps: int, *, reqs: int, tokens: int, round_s: float | None) -> list[Switch]:
    step_s = STEP_S + (round_s or 0.0)
    switches = [budget.observe(reqs, tokens, step_s, round_s) for _ in range(steps)]
    return [switch for switch in switches if switch is not None]


def test_a_slow_draft_rests_for_its_batch_size_alone() -> None:
    budget = Budget(Clock())
    (switch,) = run(budget, 32, reqs=8, tokens=16, round_s=0.2)  # twice the tokens in three times the time
    assert not switch.drafts
    assert switch.num_reqs == 15
    assert round(switch.ratio, 1) == 1.5
    assert budget.rests(8)
    assert budget.rests(15)
    assert not budget.rests(7)
    assert not budget.rests(16)


def test_a_draft_that_pays_goes_on_and_so_does_one_that_nearly_does() -> None:
    budget = Budget(Clock())
    assert not run(budget, 200, reqs=4, tokens=12, round_s=0.1)
    assert not run(budget, 200, reqs=1, tokens=2, round_s=0.104)  # 2 % more: within the hysteresis
    assert not budget.rests(4)
    assert not budget.rests(1)


def test_it_is_tried_again_and_rests_longer_if_it_loses_again() -> None:
    clock = Clock()
    budget = Budget(clock)
    assert len(run(budget, 32, reqs=8, tokens=16, round_s=0.2)) == 1
    clock.now_s = FIRST_REST_S + 1
    assert not budget.rests(8)
    assert len(run(budget, 32, reqs=8, tokens=16, round_s=0.2)) == 1
    clock.now_s += FIRST_REST_S + 1
    assert budget.rests(8), "twice as long now"
    clock.now_s += FIRST_REST_S
    assert not budget.rests(8)
    (switch,) = run(budget, 32, reqs=8, tokens=32, round_s=0.02)
    assert switch.drafts


def test_a_measured_plain_step_counts_for_more_than_a_guessed_one() -> None:
    """To verify K tokens took longer than a plain step does: it is a draft that loses against the latter."""
    guessed, measured = Budget(Clock()), Budget(Clock())
    run(measured, 4, reqs=1, tokens=1, round_s=None)
    with_drafts = [(budget, budget.observe(1, 2, 0.22, 0.06)) for _ in range(31) for budget in (guessed, measured)]
    assert all(switch is None for _, switch in with_drafts)
    assert guessed.observe(1, 2, 0.22, 0.06) is None
    switch = measured.observe(1, 2, 0.22, 0.06)
    assert switch is not None
    assert not switch.drafts


def test_a_batch_comes_back_from_its_rest_once_and_is_computed_again() -> None:
    clock = Clock()
    followed = Followed(may_rest=True, clock=clock)
    followed.follow(1, 8)
    for _ in range(32):
        clock.now_s += 3 * STEP_S
        followed.observe(8, 8, clock.now_s - 3 * STEP_S, asked(2 * STEP_S))  # nothing accepted
    assert followed.follow(1, 8) is False
    assert followed.asked == 0
    again = [followed.follow(1, 2) for _ in range(2 * RESUMES_AFTER)]
    assert again == [False] * (RESUMES_AFTER - 1) + [True] + [False] * RESUMES_AFTER
    assert followed.asked == 1


def test_a_step_whose_round_is_not_known_counts_neither_as_plain_nor_as_drafted() -> None:
    """Through a GPU's memory a round is known later. Taken for plain steps, those with drafts would be the measure."""
    clock = Clock()
    followed = Followed(may_rest=True, clock=clock)
    followed.follow(1, 8)
    for round_s in [None] * 40 + [2 * STEP_S] * 31:
        clock.now_s += 3 * STEP_S
        followed.observe(8, 8, clock.now_s - 3 * STEP_S, asked(round_s))
    followed.follow(1, 8)
    assert not followed.rests
    clock.now_s += 3 * STEP_S
    followed.observe(8, 8, clock.now_s - 3 * STEP_S, asked(2 * STEP_S))
    followed.follow(1, 8)
    assert followed.rests


def asked(round_s: float | None) -> DraftReport:
    return DraftReport(epoch=1, asked=True, round_s=round_s)


def test_a_round_is_overdue_by_what_its_size_took_of_late() -> None:
    pace = Pace(deadline_s=30.0, stall_limit_s=0.15)
    for seconds in (5.0, 4.0, 3.0):
        pace.took(10, seconds)
        assert pace.allowed_s(10) == 30.0, "the first ones compile"
    pace.took(10, 0.05)
    assert pace.allowed_s(12) == 0.05 + 0.15
    assert pace.allowed_s(100) == 30.0
    assert pace.latest_s(12) == 0.05
    assert pace.latest_s(100) is None
    assert Pace(deadline_s=30.0, stall_limit_s=None).allowed_s(10) == 30.0


def test_rounds_of_different_kinds_and_another_draft_s_are_not_known() -> None:
    pace = Pace(deadline_s=30.0, stall_limit_s=0.15)
    for _ in range(4):
        pace.took(10, 0.05, "eager")
    assert pace.allowed_s(10, "eager") == 0.05 + 0.15
    assert pace.allowed_s(10, "captured") == 30.0
    assert pace.anew().allowed_s(10, "eager") == 30.0
