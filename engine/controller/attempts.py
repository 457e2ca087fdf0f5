"""The trainer's attempts: a dead or hung rank ends one, and a bounded number follow it.

Pure values, as in `health`. Unlike a rollout worker, a trainer rank isn't replaced alone: all ranks
share each step and each shard, so the attempt ends and the run resumes from its checkpoint.
Resuming is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from engine.controller.signals import Action, Stop
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainerWatch:
    """The ranks of one attempt; the first death or hang stops it. `now` is in seconds."""

    hang_after: float  # silence that means a rank hangs, s
    deadlines: tuple[float, ...]  # by rank: when its next heartbeat is overdue
    stopped: Stop | None = None

    @classmethod
    def begin(cls, ranks: int, now: float, hang_after: float, start_timeout: float) -> Self:
        """`ranks` processes just created; the first heartbeat of each has `start_timeout`."""
        if ranks < 1 or min(hang_after, start_timeout) <= 0:
            raise ConfigError(
                f"ranks={ranks}, hang_after={hang_after}, start_timeout={start_timeout}: all three "
                "have to be above 0"
            )
        return cls(hang_after, (now + start_timeout,) * ranks)

    def heartbeat(self, rank: int, now: float) -> Self:
        """A sign of life of `rank`; the next one is due within `hang_after`."""
        at = now + self.hang_after
        deadlines = tuple(at if r == rank else old for r, old in enumerate(self.deadlines))
        return replace(self, deadlines=deadlines)

    def died(self, rank: int, cause: str) -> tuple[Self, tuple[Action, ...]]:
        """The process of `rank` has ended."""
        return self._stop(f"trainer rank {rank} died: {cause}")

    def tick(self, now: float) -> tuple[Self, tuple[Action, ...]]:
        """Time has passed. Feed the heartbeats that have come in first."""
        late = [rank for rank, deadline in enumerate(self.deadlines) if now >= deadline]
        if not late:
            return self, ()
        return self._stop(f"trainer ranks {late} hang: no heartbeat in time")

    def _stop(self, cause: str) -> tuple[Self, tuple[Action, ...]]:
        if self.stopped:
            return self, ()
        stop = Stop(cause)
        return replace(self, stopped=stop), (stop,)


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
