"""How often a run is attempted: a dead trainer rank ends an attempt, and a bounded number follow.

Pure values, as in `health`. Unlike a rollout worker, a trainer rank isn't replaced alone: all ranks
share each step and hold shards of one model, so the attempt ends, and the caller resumes the run
from its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """How often a run resumes from its checkpoint before an error ends it.

    Only consecutive failures count, with no newer checkpoint between them. So a bug that fails the
    same step each time ends the run, and rare failures in a long run don't.
    """

    max_attempts: int = 3  # attempts that may end without getting past one checkpoint; 1: no retry
    failed: int = 0  # such attempts so far
    step: int = 0  # the newest checkpoint seen, in updates

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it has to be at least 1")

    def after_failure(self, checkpoint_step: int) -> Self:
        """The budget after a failed attempt; the next one would resume at `checkpoint_step`."""
        if checkpoint_step > self.step:
            return replace(self, failed=1, step=checkpoint_step)
        return replace(self, failed=self.failed + 1)

    @property
    def may_retry(self) -> bool:
        """Whether there is an attempt left."""
        return self.failed < self.max_attempts
