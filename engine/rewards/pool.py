"""A reward in several processes, completion by completion, each with a deadline of its own.

For the engine's rules whose time and memory depend on what a model writes. A completion that takes
too long costs its process, which is forked again with all modules loaded, and no other completion.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from engine.rewards.call import RewardRows
from engine.rewards.process import RewardProcess
from engine.rewards.result import RewardFailure, Scores
from engine.rewards.threads import RowResult, late

MEMORY_BYTES = 4 << 30  # address space of a process; what needs more has no score
_MOST = 8  # processes, unless asked for


class RewardPool:
    """Calls a registered reward on single rows; its processes start with the first call."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None,
        module: str,
        *,
        components: tuple[str, ...],
        imports: tuple[str, ...] = (),
        processes: int = 0,
        sample_timeout_s: float = 5.0,
    ) -> None:
        """`processes` of 0 are as many as cores, 8 at most."""
        self.name = name
        self.components: tuple[str, ...] | None = components
        self._options, self._module = options, module
        self._imports = (module, *imports)
        self._size = processes or min(_MOST, os.cpu_count() or 1)
        self._limit_s = sample_timeout_s
        self._free: list[RewardProcess] = []

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        results = self.score_each({row: rows.row(row) for row in range(len(rows))}, timeout_s)
        found: dict[int, list[float]] = {}
        failures: dict[int, RewardFailure] = {}
        for row in range(len(rows)):
            result = results.get(row) or late(self.name, 1, timeout_s)
            if isinstance(result, RewardFailure):
                failures[row] = result
            elif result.failures:
                failures[row] = result.failures[0]
            else:
                found[row] = result.rows[0]
        return Scores.of(self.components, found, failures)

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        waiting = deque(rows)
        results: dict[int, RowResult] = {}

        def work() -> None:
            process = self._take()
            deadline = time.monotonic() + timeout_s
            try:
                while waiting and (left := deadline - time.monotonic()) > 0:
                    with suppress(IndexError):  # another thread took the last one
                        row = waiting.popleft()
                        results[row] = self._score(process, rows[row], min(left, self._limit_s))
            finally:
                self._free.append(process)

        with ThreadPoolExecutor(min(self._size, len(rows))) as threads:
            for done in [threads.submit(work) for _ in range(min(self._size, len(rows)))]:
                done.result()
        return results

    def close(self) -> None:
        """End all processes and what they left behind."""
        while self._free:
            self._free.pop().close()

    def _take(self) -> RewardProcess:
        """A process that is there, or one that is started now."""
        with suppress(IndexError):
            return self._free.pop()
        return RewardProcess(
            self.name,
            self._options,
            (self._module,),
            imports=self._imports,
            memory_bytes=MEMORY_BYTES,
        )

    def _score(self, process: RewardProcess, row: RewardRows, timeout_s: float) -> RowResult:
        try:
            return process.score_all(row, timeout_s, self.components)
        except RewardFailure as failure:
            if failure.cause == "deadline" and timeout_s == self._limit_s:
                return late(self.name, 1, timeout_s, "reward.sample_timeout_s")
            return failure
