"""A reward function in a process of its own, or in several, none of which can end the run.

What runs in the process, the run's side of it, and the pool for scoring completion by
completion. Imports neither torch nor pydantic.
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

from engine.errors import ConfigError, EngineError, RewardError
from engine.rewards.calls import (
    AT_ONCE,
    TURNS,
    RewardRows,
    RewardThreads,
    RowEnded,
    RowResult,
    RowStarted,
    late,
)
from engine.rewards.guard import START_S, GuardedProcess, ProcessEnded, TooLate, how_ended
from engine.rewards.reward_function import (
    RewardFailure,
    Scores,
    declared_components,
    import_reward,
    resolve_reward,
)

# What runs in a reward's process: it loads the function, and answers calls that come by a channel.
#
# What lives here: the messages, and the seeds of the random generators. What does not: starting
# and
# ending the process (`process`, `guard`), and the calls themselves (`threads`).


@dataclass(frozen=True, slots=True)
class LoadReward:
    """The first request of a process: which function it calls."""

    name: str  # as `reward.name`
    options: Mapping[str, object]
    modules: tuple[str, ...]  # those that may register it, likely ones first
    memory_bytes: int = 0  # most address space of the process; 0: no limit


@dataclass(frozen=True, slots=True)
class RewardLoaded:
    """Answers `LoadReward`; a ConfigError in its place says why there is none."""

    name: str  # in messages
    components: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ScoreAll:
    """A call on all rows; Scores or a RewardFailure answer it."""

    rows: RewardRows
    timeout_s: float
    components: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ScoreEach:
    """A call on each row; RowStarted and RowEnded answer it, None at each tick, RowsDone last."""

    rows: Mapping[int, RewardRows]
    timeout_s: float
    tick_s: float


@dataclass(frozen=True, slots=True)
class RowsDone:
    """Nothing more comes for `ScoreEach`."""


def serve(channel: Connection) -> None:
    """Load the reward, then answer requests until the other end closes."""
    try:
        load: LoadReward = channel.recv()
        if load.memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (load.memory_bytes, load.memory_bytes))
        reward = _Reward(load)
    except EngineError as error:
        channel.send(ConfigError(str(error)))
        return
    except EOFError:
        return
    channel.send(RewardLoaded(reward.threads.name, reward.threads.components))
    while True:
        try:
            request = channel.recv()
        except EOFError:
            return
        if isinstance(request, ScoreAll):
            channel.send(reward.score_all(request))
        else:
            reward.score_each(request, channel)
        sys.stdout.flush()


class _Reward:
    """The function, and whether it has drawn from the random generators."""

    def __init__(self, load: LoadReward) -> None:
        if ":" not in load.name:
            import_reward(load.name, load.modules)
        function = resolve_reward(load.name, load.options)
        components = declared_components(load.name)
        self.threads = RewardThreads(function, components, before_call=_seed)
        self._draws = False

    def score_all(self, request: ScoreAll) -> object:
        _seed(request.rows)
        before = _generators()
        try:
            return self.threads.score_all(request.rows, request.timeout_s, request.components)
        except RewardFailure as failure:
            return failure
        finally:
            self._draws = self._draws or _generators() != before

    def score_each(self, request: ScoreEach, channel: Connection) -> None:
        """Side by side; but one after the other where the function draws from generators."""
        at_once = 1 if self._draws else AT_ONCE
        events = self.threads.events(
            request.rows, request.timeout_s, at_once=at_once, tick_s=request.tick_s
        )
        for event in events:
            channel.send(event)
        channel.send(RowsDone())


def _seed(rows: RewardRows) -> None:
    """Seed what is drawn from by the rows' texts, so that the same rows get the same draws."""
    text = "\0".join([*rows.prompts, *rows.completions])
    seed = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _generators() -> tuple[object, ...]:
    """The state of the generators, to be compared."""
    torch = sys.modules.get("torch")
    drawn = b"" if torch is None else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), pickle.dumps(np.random.get_state()), drawn


# A reward function in a process of its own: whatever it does there, the run goes on.
#
# What lives here: the run's end of it. The process is started once and keeps its state (a model
# that
# it loaded, say) between calls, until a call ends it or takes too long; the next call starts
# another.
# `guarded` starts and ends processes, `process_main` runs in them.


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
        self._process = GuardedProcess("engine.rewards.process:serve", imports)
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


# A reward in several processes, completion by completion, each with a deadline of its own.
#
# For the engine's rules whose time and memory depend on what a model writes. A completion that
# takes
# too long costs its process, which is forked again with all modules loaded, and no other
# completion.

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
