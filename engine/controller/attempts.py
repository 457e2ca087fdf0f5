"""How many attempts a run has: a dead trainer rank ends one, and a bounded number follow it.

Pure values, as in `health`. Unlike a rollout worker, a trainer rank isn't replaced alone: all ranks
share each step and each shard, so the attempt ends and the run resumes from its checkpoint.
Resuming is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """How often a run resumes from its checkpoint before the last cause ends it.

    Only failures in a row count, with no newer checkpoint between them. So a defect that strikes
    at the same step ends the run, and rare deaths in a long run don't.
    """

    max_attempts: int = 3  # attempts that may end without getting past one checkpoint; 1: no retry
    failed: int = 0  # of them, so far
    step: int = 0  # the newest checkpoint seen, in updates

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it has to be at least 1")

    def after_failure(self, checkpoint_step: int) -> Self:
        """An attempt has ended; `checkpoint_step` is where the next one would resume."""
        if checkpoint_step > self.step:
            return replace(self, failed=1, step=checkpoint_step)
        return replace(self, failed=self.failed + 1)

    @property
    def may_retry(self) -> bool:
        """Whether one more attempt may be made."""
        return self.failed < self.max_attempts
