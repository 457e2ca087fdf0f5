"""How many attempts follow one that failed."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.trainers.fault_tolerance import RetryBudget


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


def test_no_attempt_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_attempts is 0"):
        RetryBudget(max_attempts=0)
