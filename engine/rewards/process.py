"""A reward function in a process of its own, or in several, none of which can end the run.

`RewardProcess` is the run's side, `open_service` makes what runs in the process: it loads the
function and answers calls (`engine.worker_process`). `RewardPool` scores completion by completion
in several processes. Imports neither torch nor pydantic.
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
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection

import numpy as np

from engine.errors import ConfigError, RewardError, WorkerError
from engine.rewards.calls import (
    AT_ONCE,
    TURNS,
    RewardRows,
    RewardThreads,
    RowResult,
    RowsEnded,
    RowsStarted,
    late,
    score_single_rows,
)
from engine.rewards.reward_function import (
    RewardFailure,
    Scores,
    declared_components,
    import_reward,
    resolve_reward,
)
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess

# In the reward's process.


@dataclass(frozen=True, slots=True)
class LoadReward:
    """The first request of a process: which function it calls."""

    name: str  # as `reward.name`
    options: Mapping[str, object]
    modules: tuple[str, ...]  # those that may register it, likely ones first
    memory_bytes: int = 0  # most address space of the process; 0: no limit


@dataclass(frozen=True, slots=True)
class RewardLoaded:
    """Answers `LoadReward`."""

    name: str  # in messages
    components: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """A call on each entry of `rows`.

    RowsEnded answers each, before it RowsStarted where there are several, None each tick, and
    RowsDone where some don't end in time.
    """

    rows: Mapping[int, RewardRows]
    timeout_s: float
    components: tuple[str, ...] | None = None  # that must come back; None: any
    tick_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class RowsDone:
    """Nothing more comes for `ScoreRows`, though some calls have not ended."""


def open_service(load: LoadReward, channel: Connection) -> RewardService:
    """Load the function of a reward's process."""
    return RewardService(load, channel)


class RewardService:
    """The function, and whether it has drawn from the random generators."""

    def __init__(self, load: LoadReward, channel: Connection) -> None:
        if load.memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (load.memory_bytes, load.memory_bytes))
        if ":" not in load.name:
            import_reward(load.name, load.modules)
        function = resolve_reward(load.name, load.options)
        components = declared_components(load.name)
        self._threads = RewardThreads(function, components, before_call=_seed)
        self._channel = channel
        self._draws = False
        self.loaded = RewardLoaded(self._threads.name, components)

    def run(self) -> None:
        """Answer requests until the other end closes."""
        while True:
            try:
                request: ScoreRows = self._channel.recv()
            except EOFError:
                return
            self._score(request)
            sys.stdout.flush()

    def _score(self, request: ScoreRows) -> None:
        """Score rows side by side; one after the other if the function draws from generators."""
        alone = next(iter(request.rows.values())) if len(request.rows) == 1 else None
        if alone is not None:
            _seed(alone)
        before = _generator_states()
        left = len(request.rows)
        for event in self._threads.events(
            request.rows,
            request.timeout_s,
            components=request.components,
            at_once=1 if self._draws else AT_ONCE,
            tick_s=request.tick_s,
        ):
            left -= isinstance(event, RowsEnded)
            if alone is None or not isinstance(event, RowsStarted):
                self._channel.send(event)
        if alone is not None and not self._draws:
            self._draws = _generator_states() != before
        if left:
            self._channel.send(RowsDone())


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


class RewardProcess:
    """Calls a reward in its own process.

    The process keeps its state (a model that it loaded, say) between calls, until a call ends it or
    takes too long; the next call starts another. Raises ConfigError for a name that can't be
    resolved there, and RewardError where the process ends while it loads the function.
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

        `imports`: see `WorkerProcess`. `memory_bytes` limits the process's address space.
        """
        self._load = LoadReward(name, options or {}, modules, memory_bytes)
        self._process = WorkerProcess(
            f"reward {name!r}", "engine.rewards.process:open_service", imports
        )
        loaded = self._start()
        self.name, self.components = loaded.name, loaded.components

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        self._restart()
        deadline = time.monotonic() + timeout_s
        results: dict[int, RowResult] = {}
        request = ScoreRows({0: rows}, timeout_s, components)
        self._score_group(request, deadline, timeout_s, set(), results)
        result = results.get(0) or late(self.name, len(rows), timeout_s)
        if isinstance(result, RewardFailure):
            raise result
        return result

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """As `RewardThreads.score_each`.

        Rows that were under way as the process was lost are tried alone, so that only those that
        end it fail.
        """
        deadline = time.monotonic() + timeout_s
        groups = deque([list(rows)])
        results: dict[int, RowResult] = {}
        while groups and time.monotonic() < deadline:
            group = groups.popleft()
            patience = _patience(timeout_s, deadline, len(groups) if len(group) == 1 else 0)
            started: set[int] = set()
            try:
                part = {row: rows[row] for row in group}
                request = ScoreRows(part, timeout_s, tick_s=patience / 4)
                self._score_group(request, deadline, patience, started, results)
                continue
            except RewardFailure as failure:
                lost = failure
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

    def _score_group(
        self,
        request: ScoreRows,
        deadline: float,
        patience_s: float,
        started: set[int],
        results: dict[int, RowResult],
    ) -> None:
        """Score rows in one process, into `results`; raise RewardFailure where it is lost."""
        self._restart()
        try:
            self._process.send(request, min(deadline, time.monotonic() + patience_s))
            if len(request.rows) == 1:
                started.update(request.rows)
            while not request.rows.keys() <= results.keys():
                message = self._process.receive(min(deadline, time.monotonic() + patience_s))
                if isinstance(message, RowsStarted):
                    started.add(message.key)
                elif isinstance(message, RowsEnded):
                    results[message.key] = message.result
                elif isinstance(message, ProcessEnded):
                    size = max(map(len, request.rows.values()))
                    what = f"{size} completions" if size > 1 else "a completion"
                    raise RewardFailure(
                        "crashed",
                        f"the process of reward {self.name!r} {message.how} while it scored {what}",
                        message.stderr,
                    )
                elif isinstance(message, RowsDone):
                    self._process.end()  # what hangs must not go on beside the next call
                    return
        except TooLate:
            self._process.end()
            if time.monotonic() < deadline:
                raise late(self.name, 1, patience_s) from None

    def _start(self) -> RewardLoaded:
        try:
            loaded = self._process.start(self._load)
        except WorkerError as error:
            raise RewardError(str(error)) from None
        assert isinstance(loaded, RewardLoaded)
        return loaded

    def _restart(self) -> None:
        """Start the process if it isn't there; raise RewardFailure where that fails."""
        if not self._process.running:
            try:
                self._start()
            except (RewardError, ConfigError) as error:
                raise RewardFailure("crashed", str(error)) from None


def _patience(timeout_s: float, deadline: float, alone: int) -> float:
    """Seconds without a word after which a process is held to be stuck, its lock held by C code.

    `alone` is the number of rows that are still to be tried alone: each gets its share.
    """
    patience = min(max(2.0, timeout_s / TURNS), timeout_s / 2)
    if alone:
        patience = min(patience, (deadline - time.monotonic()) / (alone + 1))
    return max(patience, 0.01)


MEMORY_BYTES = 4 << 30  # address space of a process; what needs more has no score
_MOST_PROCESSES = 8  # unless asked for


class RewardPool:
    """Calls a registered reward on single rows, each with a deadline, in several processes.

    For the engine's rules whose time and memory depend on what a model writes. A completion that
    takes too long costs its process, which is forked again with all modules loaded, and no other
    completion. The processes start with the first call.
    """

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
        self._size = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._limit_s = sample_timeout_s
        self._free: list[RewardProcess] = []

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        return score_single_rows(self, rows, timeout_s, self.components)

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
