"""Who runs, who waits, who is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.serving.admission import LONGEST_RETRY_S, SHORTEST_RETRY_S, Admission, QueueFullError


def admission(running: int = 2, queued: int = 2) -> Admission:
    return Admission(max_running=running, max_queued=queued, clock=lambda: 0.0)


def test_requests_run_then_wait_then_are_refused() -> None:
    door = admission()
    tickets = [door.enter([1])[0] for _ in range(4)]
    assert [ticket.admitted.is_set() for ticket in tickets] == [True, True, False, False]
    assert (door.running, door.queued) == (2, 2)
    with pytest.raises(QueueFullError) as refusal:
        door.enter([1])
    assert SHORTEST_RETRY_S <= refusal.value.retry_after_s <= LONGEST_RETRY_S
    door.leave(tickets[0])
    assert tickets[2].admitted.is_set()
    assert not tickets[3].admitted.is_set()
    door.leave(tickets[3])  # gave up waiting
    assert (door.running, door.queued) == (2, 0)


def test_one_with_many_choices_is_not_overtaken() -> None:
    door = admission(running=4, queued=8)
    first, wide, narrow = door.enter([2, 4, 1])
    assert (first.admitted.is_set(), wide.admitted.is_set(), narrow.admitted.is_set()) == (True, False, False)
    door.leave(first)
    assert wide.admitted.is_set()
    assert not narrow.admitted.is_set()


def test_a_batch_enters_whole_or_not_at_all() -> None:
    door = admission()
    with pytest.raises(QueueFullError):
        door.enter([1] * 5)
    assert (door.running, door.queued) == (0, 0)


@settings(deadline=None)  # a busy machine
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 20)), max_size=60))
def test_counts_never_pass_their_bounds_and_come_back_to_nothing(steps: list[tuple[bool, int, int]]) -> None:
    door = admission(running=4, queued=6)
    tickets = []
    for entering, choices, which in steps:
        if entering:
            try:
                tickets += door.enter([choices])
            except QueueFullError:
                assert door.running + door.queued + choices > 10
        elif tickets:
            ticket = tickets.pop(which % len(tickets))
            door.leave(ticket)
            door.leave(ticket)
        assert 0 <= door.running <= 4
        assert door.running == sum(ticket.choices for ticket in tickets if ticket.admitted.is_set())
        # The head of the queue waits only where it doesn't fit.
        waiting = [ticket for ticket in tickets if not ticket.admitted.is_set()]
        assert not waiting or door.running + waiting[0].choices > 4
    for ticket in tickets:
        door.leave(ticket)
    assert (door.running, door.queued) == (0, 0)
