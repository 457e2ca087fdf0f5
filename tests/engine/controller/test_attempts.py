"""The trainer's attempts: what ends one, and how many follow."""

from __future__ import annotations

import pytest

from engine.controller.attempts import RetryBudget, TrainerWatch
from engine.controller.signals import Stop
from engine.errors import ConfigError


def watch() -> TrainerWatch:
    return TrainerWatch.begin(ranks=2, now=100.0, hang_after=10.0, start_timeout=60.0)


def test_a_dead_rank_stops_the_attempt_at_once_and_only_once() -> None:
    state, actions = watch().died(1, "killed by signal 9")
    assert actions == (Stop("trainer rank 1 died: killed by signal 9"),)
    state, actions = state.died(0, "lost its peer")
    assert actions == ()
    assert state.tick(1e6)[1] == ()
    assert state.stopped == Stop("trainer rank 1 died: killed by signal 9")


def test_a_silent_rank_stops_the_attempt() -> None:
    state = watch().heartbeat(0, 110.0).heartbeat(1, 110.0)
    state = state.heartbeat(0, 118.0)
    assert state.tick(119.9)[1] == ()
    _, actions = state.tick(120.0)
    assert actions == (Stop("trainer ranks [1] hang: no heartbeat in time"),)


def test_a_slow_start_is_no_hang_until_its_own_deadline() -> None:
    state = watch().heartbeat(0, 155.0)
    assert state.tick(159.9)[1] == ()
    assert "[1]" in state.tick(160.0)[1][0].cause  # type: ignore[union-attr]


def test_retries_are_bounded_at_the_same_checkpoint_and_begin_anew_after_progress() -> None:
    budget = RetryBudget(max_attempts=3)
    for step, may in ((0, True), (0, True), (10, True), (10, True), (5, False)):
        budget = budget.after_failure(step)
        assert budget.may_retry is may, step
    assert (budget.failed, budget.step) == (3, 10)
    assert not RetryBudget(max_attempts=1).after_failure(7).may_retry


def test_a_run_that_always_gets_on_is_never_given_up() -> None:
    budget = RetryBudget(max_attempts=2)
    for step in range(1, 50):
        budget = budget.after_failure(step)
        assert budget.may_retry


@pytest.mark.parametrize(("ranks", "hang", "start"), [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0)])
def test_settings_that_can_t_work_are_refused(ranks: int, hang: float, start: float) -> None:
    with pytest.raises(ConfigError):
        TrainerWatch.begin(ranks, 0.0, hang, start)
    with pytest.raises(ConfigError):
        RetryBudget(max_attempts=0)
