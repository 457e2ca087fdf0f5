"""A reward function in a process of its own, or in several, none of which can end the run.

`RewardProcess` is the run's side, `RewardService` runs in the process: it loads the function and
answers calls (`engine.worker_process`). `RewardPool` scores completion by completion in several
processes. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from engine.errors import ConfigError, RewardError, WorkerError
from engine.rewards.calls import (
    AT_ONCE,
    TURNS,
    RewardRows,
    RewardScorer,
    RewardThreads,
    RowResult,
    counted,
    late,
    score_single_rows,
)
from engine.rewards.reward_function import (
    RegisteredReward,
    RewardFailure,
    Scores,
    declared_components,
    import_reward,
    resolve_reward,
)
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess

# In the reward's process. The first message has the arguments of `RewardService`, which answers
# with the reward's name and components. Each further one is (rows, timeout_s, tick_s), which
# `RewardThreads.events` answers, and None where some calls don't end in time.


class RewardService:
    """The function, and whether it has drawn from the random generators."""

    def __init__(self, load: Mapping[str, Any], channel: Connection) -> None:
        name, memory_bytes = load["name"], load["memory_bytes"]
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        if ":" not in name:
            import_reward(name, load["modules"])
        function = resolve_reward(name, load["options"])
        self._threads = RewardThreads(function, declared_components(name), _seed)
        self._channel = channel
        self._draws = False
        self.loaded = self._threads.name, self._threads.components

    def run(self) -> None:
        """Answer requests until the other end closes."""
        with suppress(EOFError):
            while True:
                self._score(*self._channel.recv())
                sys.stdout.flush()

    def _score(self, rows: Mapping[int, RewardRows], timeout_s: float, tick_s: float) -> None:
        """Score rows side by side; one after the other if the function draws from generators."""
        if len(rows) == 1:
            _seed(*rows.values())
        before = _generator_states()
        left = len(rows)
        at_once = 1 if self._draws else AT_ONCE
        for key, result in self._threads.events(rows, timeout_s, at_once, tick_s):
            left -= result is not None
            self._channel.send((key, result))
        if len(rows) == 1 and not self._draws:
            self._draws = _generator_states() != before
        if left:
            self._channel.send(None)


def _seed(rows: RewardRows) -> None:
    """Seed what is drawn from by the rows' texts, so that the same rows get the same draws."""
    text = "\0".join([*rows.prompts, *rows.completions])
    seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _generator_states() -> tuple[object, ...]:
    """The state of the generators, to be compared."""
    torch = sys.modules.get("torch")
    drawn = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), pickle.dumps(np.random.get_state()), drawn


# The run's side.


class RewardProcess(RewardScorer):
    """Calls a reward in its own process.

    The process keeps its state (a model that it loaded, say) between calls, until a call ends it or
    takes too long; the next call starts another. Raises ConfigError for a name that can't be
    resolved there, and RewardError where the process ends while it loads the function.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None,
        modules: tuple[str, ...],
        imports: tuple[str, ...] = (),
        memory_bytes: int = 0,
    ) -> None:
        """`modules` are those that may register `name`, likely ones first.

        `imports`: see `WorkerProcess`. `memory_bytes` limits the process's address space.
        """
        self._load = {
            "name": name,
            "options": options or {},
            "modules": modules,
            "memory_bytes": memory_bytes,
        }
        self._process = WorkerProcess(
            f"reward {name!r}", "engine.rewards.process:RewardService", imports
        )
        try:
            loaded: Any = self._process.start(self._load)
        except WorkerError as error:
            raise RewardError(str(error)) from None
        self.name, self.components = loaded

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """As `RewardThreads.score_each`.

        Rows that were under way as the process was lost are tried alone, so that only those that
        end it fail.
        """
        self._restart()  # which has time of its own
        deadline = time.monotonic() + timeout_s
        groups = deque([list(rows)])
        results: dict[int, RowResult] = {}
        while groups and time.monotonic() < deadline:
            group = groups.popleft()
            # Seconds without a word until it is held to be stuck, its lock held by C code. Each of
            # those that are to be tried alone gets its share.
            patience = min(max(2.0, timeout_s / TURNS), timeout_s / 2)
            if len(rows) == 1:
                patience = timeout_s
            elif len(group) == 1 and groups:
                patience = min(patience, (deadline - time.monotonic()) / (len(groups) + 1))
            started: set[int] = set()
            part = {row: rows[row] for row in group}
            lost = self._score_group(part, deadline, max(patience, 0.01), started, results)
            if lost is None:
                continue
            if not started and lost.cause == "crashed":  # the function can't even be loaded
                return results | dict.fromkeys([*group, *chain(*groups)], lost)
            suspects = [row for row in group if row in started and row not in results]
            if len(suspects) == 1:
                results[suspects[0]] = lost
            else:
                groups.extend([row] for row in suspects)
            if untried := [row for row in group if row not in started]:
                groups.appendleft(untried)
        if groups:
            self._process.end()
        return results

    def close(self) -> None:
        """End the process and all that it left behind."""
        self._process.close()

    def _restart(self) -> RewardFailure | None:
        """Start the process if it isn't there; why it can't be, if so."""
        try:
            if not self._process.running:
                self._process.start(self._load)
        except (WorkerError, ConfigError) as error:
            return RewardFailure("crashed", str(error))
        return None

    def _score_group(
        self,
        rows: Mapping[int, RewardRows],
        deadline: float,
        patience_s: float,
        started: set[int],
        results: dict[int, RowResult],
    ) -> RewardFailure | None:
        """Score rows in the process, into `results`; why it was lost, if it was."""
        if failure := self._restart():
            return failure
        request = rows, round(deadline - time.monotonic(), 2), patience_s / 4
        try:
            self._process.send(request, min(deadline, time.monotonic() + patience_s))
            if len(rows) == 1:
                started.update(rows)
            while not rows.keys() <= results.keys():
                message: Any = self._process.receive(min(deadline, time.monotonic() + patience_s))
                if isinstance(message, ProcessEnded):
                    return RewardFailure(
                        "crashed",
                        f"the process of reward {self.name!r} {message.how} while it scored "
                        f"{counted(max(map(len, rows.values())))}",
                        message.stderr,
                    )
                if message is None:
                    self._process.end()  # what hangs must not go on beside the next call
                    break
                key, result = message
                if result is not None:
                    results[key] = result
                elif key in rows:
                    started.add(key)
        except TooLate:
            self._process.end()
            if time.monotonic() < deadline:
                return late(self.name, 1, patience_s)
        return None


MEMORY_BYTES = 4 << 30  # address space of a process; what needs more has no score
_MOST_PROCESSES = 8  # unless asked for


class RewardPool(RewardScorer):
    """Calls a registered reward on single rows, each with a deadline, in several processes.

    For the engine's rules whose time and memory depend on what a model writes. A completion that
    takes too long costs its process, which is forked again with all modules loaded, and no other
    completion. The processes start with the first call.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None,
        entry: RegisteredReward,
        processes: int,
        sample_timeout_s: float,
    ) -> None:
        """`entry` is that of `name`. `processes` of 0 are as many as cores, 8 at most."""
        self.name, self.components = name, entry.components
        self._options = options
        self._module = entry.function.__module__
        self._imports = (self._module, *entry.imports)
        self._size = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._limit_s = sample_timeout_s
        self._free: list[RewardProcess] = []

    def score_all(self, rows: RewardRows, timeout_s: float) -> Scores:
        return score_single_rows(self, rows, timeout_s)

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

        count = min(self._size, len(rows))
        with ThreadPoolExecutor(count) as threads:
            for done in [threads.submit(work) for _ in range(count)]:
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
        return RewardProcess(self.name, self._options, (self._module,), self._imports, MEMORY_BYTES)

    def _score(self, process: RewardProcess, row: RewardRows, timeout_s: float) -> RowResult:
        try:
            return process.score_all(row, timeout_s)
        except RewardFailure as failure:
            if failure.cause == "deadline" and timeout_s == self._limit_s:
                return late(self.name, 1, timeout_s, "reward.sample_timeout_s")
            return failure
