"""A reward function in a process of its own: whatever it does there, the run goes on.

What lives here: the run's end of it. The process is started once and keeps its state (a model that
it loaded, say) between calls, until a call ends it or takes too long; the next call starts another.
`guarded` starts and ends processes, `process_main` runs in them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import chain

from engine.errors import ConfigError, RewardError
from engine.rewards.call import RewardRows
from engine.rewards.guard import ProcessEnded
from engine.rewards.guarded import START_S, GuardedProcess, TooLate, how_ended
from engine.rewards.process_main import (
    LoadReward,
    RewardLoaded,
    RowsDone,
    ScoreAll,
    ScoreEach,
)
from engine.rewards.result import RewardFailure, Scores
from engine.rewards.threads import TURNS, RowEnded, RowResult, RowStarted, late


class RewardProcess:
    """Calls a reward in its own process.

    Raises ConfigError for a name that can't be resolved there, and RewardError where the process
    ends while it loads the function.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None = None,
        modules: tuple[str, ...] = (),
        *,
        imports: tuple[str, ...] = (),
        memory_bytes: int = 0,
    ) -> None:
        """`modules` are those that may register `name`, likely ones first.

        `imports` are the engine's or a library's, never a user's: the guard loads them once, and
        each process has them at its start. `memory_bytes` limits the process's address space.
        """
        self._load = LoadReward(name, options or {}, modules, memory_bytes)
        self._process = GuardedProcess("engine.rewards.process_main:serve", imports)
        self.name, self.components = name, None
        loaded = self._running()
        self.name, self.components = loaded.name, loaded.components

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        try:
            self._running()
            deadline = time.monotonic() + timeout_s
            self._process.send(ScoreAll(rows, timeout_s, components), deadline)
            answer = self._process.receive(deadline)
        except TooLate:
            self._process.end()
            raise late(self.name, len(rows), timeout_s) from None
        except (RewardError, ConfigError) as error:  # of a new start
            raise RewardFailure("crashed", str(error)) from None
        if isinstance(answer, ProcessEnded):
            raise self._crashed(answer, len(rows))
        if isinstance(answer, RewardFailure):
            if answer.cause == "deadline":
                self._process.end()  # what hangs must not go on beside the next call
            raise answer
        assert isinstance(answer, Scores)
        return answer

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """As `RewardThreads.score_each`; rows that were under way as the process was lost are
        tried alone, so that only those that end it fail."""
        deadline = time.monotonic() + timeout_s
        groups = deque([list(rows)])
        results: dict[int, RowResult] = {}
        while groups and time.monotonic() < deadline:
            group = groups.popleft()
            patience = _patience(timeout_s, deadline, len(groups) if len(group) == 1 else 0)
            started, lost = self._attempt(
                {row: rows[row] for row in group}, timeout_s, deadline, patience, results
            )
            if lost is None:
                continue
            suspects = [row for row in group if row in started and row not in results]
            untried = [row for row in group if row not in started]
            if not started and lost.cause == "crashed":  # the function can't even be loaded
                return results | dict.fromkeys([*group, *chain(*groups)], lost)
            if len(suspects) == 1:
                results[suspects[0]] = lost
            else:
                groups.extend([row] for row in suspects)
            if untried:
                groups.appendleft(untried)
        if groups:
            self._process.end()
        return results

    def close(self) -> None:
        """End the process and all that it left behind."""
        self._process.close()

    def _attempt(
        self,
        rows: Mapping[int, RewardRows],
        timeout_s: float,
        deadline: float,
        patience_s: float,
        results: dict[int, RowResult],
    ) -> tuple[set[int], RewardFailure | None]:
        """Score rows in one process, into `results`; which were started, and how it was lost."""
        started: set[int] = set()
        try:
            self._running()
            until = min(deadline, time.monotonic() + patience_s)
            self._process.send(ScoreEach(rows, timeout_s, patience_s / 4), until)
            while True:
                until = min(deadline, time.monotonic() + patience_s)
                message = self._process.receive(until)
                if isinstance(message, RowStarted):
                    started.add(message.row)
                elif isinstance(message, RowEnded):
                    results[message.row] = message.result
                elif isinstance(message, ProcessEnded):
                    return started, self._crashed(message, 1)
                elif isinstance(message, RowsDone):
                    if len(results.keys() & rows.keys()) < len(rows):
                        self._process.end()  # what hangs must not go on beside the next call
                    return started, None
        except TooLate:
            self._process.end()
            return started, None if time.monotonic() >= deadline else late(self.name, 1, patience_s)
        except (RewardError, ConfigError) as error:  # of a new start
            return started, RewardFailure("crashed", str(error))

    def _running(self) -> RewardLoaded:
        """Start the process if it isn't there; return what it loaded."""
        if self._process.running:
            return RewardLoaded(self.name, self.components)
        self._process.start()
        try:
            deadline = time.monotonic() + START_S
            self._process.send(self._load, deadline)
            answer = self._process.receive(deadline)
        except TooLate:
            self._process.end()
            raise RewardError(
                f"reward {self.name!r} was not loaded within {START_S:g} s; let its module import "
                "less"
            ) from None
        if isinstance(answer, ConfigError):
            self._process.end()
            raise answer
        if isinstance(answer, ProcessEnded):
            raise RewardError(
                f"the process of reward {self.name!r} {how_ended(answer.code)} while it imported "
                "the reward's module; correct what runs on import"
            )
        assert isinstance(answer, RewardLoaded)
        return answer

    def _crashed(self, ended: ProcessEnded, size: int) -> RewardFailure:
        what = f"{size} completions" if size > 1 else "a completion"
        return RewardFailure(
            "crashed",
            f"the process of reward {self.name!r} {how_ended(ended.code)} while it scored {what}",
        )


def _patience(timeout_s: float, deadline: float, alone: int) -> float:
    """Seconds without a word after which a process is held to be stuck, its lock held by C code.

    `alone` is the number of rows that are still to be tried alone: each gets its share.
    """
    patience = min(max(2.0, timeout_s / TURNS), timeout_s / 2)
    if alone:
        patience = min(patience, (deadline - time.monotonic()) / (alone + 1))
    return max(patience, 0.01)
