"""Asynchronous admission: scenarios by hand."""

from __future__ import annotations

import pytest
from invariants import check_admission

from engine.controller.rollout_queue import Admission, AdmissionLimits, AdmittedGroup, Ticket
from engine.errors import RolloutError


def begin(state: Admission, count: int, version: int = 0) -> tuple[Admission, list[Ticket]]:
    tickets = []
    for _ in range(count):
        state, ticket = state.start("w", version)
        tickets.append(ticket)
    check_admission(state)
    return state, tickets


def finish(state: Admission, tickets: list[Ticket], *versions: int) -> Admission:
    for ticket in tickets:
        state, counts = state.finished(ticket, versions)
        assert counts
    check_admission(state)
    return state


def keys(batch: tuple[AdmittedGroup, ...]) -> list[int]:
    return [group.ticket.key for group in batch]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_begins_as_many_groups_as_areal_allows(staleness: int) -> None:
    state = Admission(AdmissionLimits(batch=4, staleness=staleness))
    started = 0
    while state.may_start(0):
        assert started // 4 <= staleness
        state, _ = begin(state, 1)
        started += 1
    assert started // 4 == staleness + 1
    with pytest.raises(RolloutError, match="room for 0"):
        state.start("w", 0)


def test_without_staleness_it_is_synchronous_and_on_policy() -> None:
    state = Admission(AdmissionLimits(batch=3, staleness=0))
    for version in range(4):
        assert state.take()[1] == ()
        state, tickets = begin(state, 3, version)
        state = finish(state, tickets[::-1], version)
        state, batch = state.take()
        assert keys(batch) == [3 * version, 3 * version + 1, 3 * version + 2]
        assert {(g.oldest, g.newest) for g in batch} == {(version, version)}
        assert not state.may_start(version), "nothing may start with weights about to change"
        state = state.updated(version + 1)
        assert not state.may_start(version), "a worker with the old weights has to wait"


def test_an_interrupted_group_stays_as_old_as_its_oldest_token() -> None:
    state = Admission(AdmissionLimits(batch=1, staleness=1))
    state, [first, second] = begin(state, 2)
    state, batch = finish(state, [first], 0).take()
    state = state.updated(1)
    state, batch = finish(state, [second], 0, 1).take()
    assert [(g.oldest, g.newest) for g in batch] == [(0, 1)]


def test_the_trainer_waits_for_a_group_before_it_gets_too_old() -> None:
    state, [slow, *fast] = begin(Admission(AdmissionLimits(batch=2, staleness=1)), 4)
    state, _ = finish(state, fast, 0).take()
    state = state.updated(1)
    state, fast = begin(state, 2, version=1)
    state = finish(state, fast, 1)
    assert len(state.queue) == 3
    assert state.take()[1] == ()
    state, batch = finish(state, [slow], 0, 1).take()
    assert keys(batch) == [0, 3]
    check_admission(state.updated(2))


def test_a_worker_behind_begins_nothing_that_can_t_be_consumed_in_time() -> None:
    state = Admission(AdmissionLimits(batch=1, staleness=1))
    state, [first] = begin(state, 1)
    state, _ = finish(state, [first], 0).take()
    state = state.updated(1)
    state, _ = begin(state, 1, version=0)
    assert state.capacity == 1
    assert not state.may_start(0)
    assert state.may_start(1)


def test_a_dead_worker_s_prompts_are_sampled_again_and_its_late_answer_is_ignored() -> None:
    state = Admission(AdmissionLimits(batch=2, staleness=0))
    state, kept = state.start("alive", 0)
    state, old = state.start("dead", 0)
    state, lost = state.lost("dead")
    check_admission(state)
    assert (lost, state.reissued, state.resample) == ((old,), 1, (1,))
    assert state.lost("dead")[1] == ()
    state, new = state.start("alive", 0)
    assert (new.key, new.attempt) == (old.key, 2)
    state, counts = state.finished(old, {0})
    assert not counts
    state = finish(state, [new, kept], 0)
    state, counts = state.finished(new, {0})
    assert not counts, "a second answer of the same attempt"
    assert state.late == 2
    assert keys(state.take()[1]) == [0, 1]


def test_reject_concerns_one_group_for_good() -> None:
    state, [a, b, c] = begin(Admission(AdmissionLimits(batch=3, staleness=0)), 3)
    state = state.reject(b)
    check_admission(state)
    assert (state.resample, list(state.in_flight), state.rejected, state.capacity) == (
        (),
        [0, 2],
        1,
        1,
    )
    assert state.reject(b).late == 1
    state, [new] = begin(state, 1)
    assert new.key == 3
    assert keys(finish(state, [a, c, new], 0).take()[1]) == [0, 2, 3]


def test_nothing_is_begun_that_the_run_s_last_update_can_t_consume() -> None:
    state = Admission(AdmissionLimits(batch=2, staleness=3, steps=2))
    state, tickets = begin(state, 4)
    assert state.capacity == 0
    assert state.reject(tickets[0]).capacity == 1


def test_what_breaks_the_protocol_is_refused() -> None:
    state, [ticket] = begin(Admission(AdmissionLimits(batch=1, staleness=0)), 1)
    with pytest.raises(RolloutError, match="trainer is at 0"):
        state.may_start(1)
    with pytest.raises(RolloutError, match="trainer is at 0"):
        state.finished(ticket, {0, 1})
    with pytest.raises(RolloutError, match="version of each token"):
        state.finished(ticket, ())
    with pytest.raises(RolloutError, match="version of each token"):
        state.finished(ticket, {-1, 0})
    with pytest.raises(RolloutError, match="without a batch"):
        state.updated(1)
    state, _ = finish(state, [ticket], 0).take()
    with pytest.raises(RolloutError, match="isn't done"):
        state.take()
    with pytest.raises(RolloutError, match="can't follow"):
        state.updated(2)


def test_check_sees_what_is_broken() -> None:
    state, _ = begin(Admission(AdmissionLimits(batch=2, staleness=0)), 2)
    lost = Admission(state.limits, drawn=3, in_flight=state.in_flight)
    doubled = Admission(state.limits, drawn=2, in_flight=state.in_flight, resample=(0,))
    old = Admission(state.limits, version=1, consumed=2, drawn=4, in_flight=state.in_flight)
    for broken, message in ((lost, "lost"), (doubled, "two places"), (old, "too old")):
        with pytest.raises(RolloutError, match=message):
            check_admission(broken)
