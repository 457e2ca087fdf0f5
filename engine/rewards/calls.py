"""Calls of a reward function, which can't hang a run, end it, or corrupt a batch.

`score` is the front door: all rows in one call, and each by itself where that fails, so that only
the rows at fault have no score. It is given a `RewardScorer`: `RewardThreads` calls a function on
threads of this process, `RewardProcess` in a process of its own (`engine.worker_process`), and
`RewardPool` scores completion by completion in several. Imports neither torch nor pydantic.
"""

import asyncio
import hashlib
import inspect
import logging
import os
import pickle
import queue
import random
import re
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, Literal, ParamSpec, Self, TypeAlias, TypeVar

import numpy as np

from engine.errors import ConfigError, RewardError, WorkerError, counted
from engine.rewards import reward_function
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess, on_daemon_thread

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardRows:
    """What a reward function is given: B prompts, completions, and entries of each column."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[object]]
    numbers: Sequence[int] = field(default=(), compare=False)  # of the rows, in messages; 0 … B-1

    def __post_init__(self) -> None:
        if not self.numbers:
            object.__setattr__(self, "numbers", range(len(self)))
        for name in {"prompts", "completions"} & self.columns.keys():
            raise RewardError(
                f"column {name!r} has the name of an argument of every reward; rename the column"
            )
        for name, values in {"prompts": self.prompts, **self.columns}.items():
            if len(values) != len(self):
                raise RewardError(
                    f"{name} has {len(values)} entries for {len(self)} completions; "
                    "give one for each"
                )

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, indices: Sequence[int]) -> Self:
        """Return the rows at `indices`, in that order."""
        return type(self)(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
            [self.numbers[i] for i in indices],
        )


class _DaemonThreads(ThreadPoolExecutor):
    """An executor for `asyncio.to_thread`, which takes nothing but a ThreadPoolExecutor."""

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.BoundedSemaphore(32)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def in_turn() -> T:
            with self._free:
                return fn(*args, **kwargs)

        return on_daemon_thread(in_turn)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for nothing: what still runs has been given up."""


class DeadlinePassed(Exception):
    """The call's own deadline, as distinct from a TimeoutError that the reward raised."""


def call_reward(
    function: reward_function.RewardFunction, rows: RewardRows, deadline: float
) -> object:
    """Call a reward function in this thread; a coroutine function's result is awaited.

    A coroutine is cancelled at `deadline` (of `time.monotonic`), which raises DeadlinePassed. A
    plain function is not: whoever waits for the thread gives it up.
    """
    # Lists of its own: a function may empty them, and the rows may be needed again.
    columns = {name: list(values) for name, values in rows.columns.items()}
    result: object = function(list(rows.prompts), list(rows.completions), **columns)
    return asyncio.run(_awaited(result, deadline)) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[object], deadline: float) -> object:
    asyncio.get_running_loop().set_default_executor(_DaemonThreads())
    timeout = asyncio.timeout(deadline - time.monotonic())
    try:
        async with timeout:
            return await result
    except TimeoutError:
        if timeout.expired():
            raise DeadlinePassed from None
        raise


# Scoring on threads of this process.

AT_ONCE = 16  # single rows that are scored side by side
TURNS = 8  # a row that takes more than 1/8 of the time no longer keeps others waiting
_LONGEST = 300  # characters of an exception's text

RowResult: TypeAlias = reward_function.Scores | reward_function.RewardFailure


class RewardScorer(ABC):
    """A reward function that is ready to be called, in this process or in one of its own."""

    name: str  # in messages, e.g. "my_rewards.by_length"
    components: tuple[str, ...] | None  # as declared or returned; None: nothing is known yet

    def score_all(self, rows: RewardRows, timeout_s: float) -> reward_function.Scores:
        """One call on all rows; raise RewardFailure where it fails as a whole."""
        results = self.score_each({0: rows}, timeout_s)
        result = results.get(0) or late(self.name, len(rows), timeout_s)
        if isinstance(result, reward_function.RewardFailure):
            raise result
        return result

    @abstractmethod
    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """Call on each entry of `rows`, by its key; return those that ended by the deadline."""

    @abstractmethod
    def close(self) -> None:
        """End what runs; called once."""


class RewardThreads(RewardScorer):
    """Calls a reward on threads of this process; it keeps nothing between calls."""

    def __init__(
        self,
        function: reward_function.RewardFunction,
        components: tuple[str, ...] | None = None,
        before_call: Callable[[RewardRows], None] = lambda rows: None,
    ) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.components = components
        self._function, self._before_call = function, before_call

    def close(self) -> None:
        """Do nothing: threads are daemons and end with their call."""

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        events = self.events(rows, timeout_s)
        return {key: result for key, result in events if result is not None}

    def events(
        self,
        rows: Mapping[int, RewardRows],
        timeout_s: float,
        at_once: int = AT_ONCE,
        tick_s: float = float("inf"),
    ) -> Iterator[tuple[int, RowResult | None]]:
        """Call the reward on each entry of `rows`, side by side; yield what began and ended.

        (key, None) says that a call began, (key, result) that it ended, (-1, None) that nothing
        happened for `tick_s`. The threads are at most `at_once * (TURNS + 1)`: a call that takes
        long gives its turn to the next but may still end, so a few that hang don't keep the others
        from being scored.
        """
        deadline = time.monotonic() + timeout_s
        ended: queue.SimpleQueue[tuple[int, Future[object]]] = queue.SimpleQueue()
        waiting = deque(rows)
        turns: dict[int, float] = {}  # key → when its turn is over
        under_way = 0
        while waiting or under_way:
            now = time.monotonic()
            turns = {key: until for key, until in turns.items() if until > now}
            while waiting and len(turns) < at_once and now < deadline:
                key = waiting.popleft()
                yield key, None
                self._before_call(rows[key])
                call = on_daemon_thread(call_reward, self._function, rows[key], deadline)
                call.add_done_callback(lambda done, key=key: ended.put((key, done)))  # type: ignore[misc]
                turns[key] = now + timeout_s / TURNS
                under_way += 1
            wake = min([deadline, now + tick_s, *(turns.values() if waiting else ())])
            try:
                key, call = ended.get(timeout=max(wake - time.monotonic(), 0.0))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return
                yield -1, None
                continue
            turns.pop(key, None)
            under_way -= 1
            yield key, self._read(call, rows[key], timeout_s)

    def _read(self, call: Future[object], rows: RewardRows, timeout_s: float) -> RowResult:
        error = call.exception()
        if isinstance(error, DeadlinePassed):
            return late(self.name, len(rows), timeout_s)
        if error is not None:
            message = text_of(error)
            if isinstance(error, RewardError):  # which says what is wrong, maybe with a row of ours
                message = _ROW.sub(lambda row: _numbered(row, rows), message)
            else:
                message = f"reward {self.name!r} raised {type(error).__name__}: {message}"
            failure = reward_function.RewardFailure("raised", message)
        else:
            result = call.result()
            try:
                return reward_function.read_result(self.name, result, len(rows), rows.numbers)
            except reward_function.RewardFailure as malformed:
                return malformed
            except Exception as unreadable:  # any object may be here, and fail in its own way
                error = unreadable
                failure = reward_function.RewardFailure(
                    "malformed",
                    f"reward {self.name!r} returned {type(result).__name__}, which can't be read "
                    f"({type(error).__name__}: {text_of(error)}); return a plain list",
                )
        failure.__cause__ = error
        return failure


_ROW = re.compile(r"\Arow (\d{1,9}): ")  # as rewards name a row of their call


def _numbered(row: re.Match[str], rows: RewardRows) -> str:
    index = int(row[1])
    return f"row {rows.numbers[index]}: " if index < len(rows) else row[0]


def late(
    name: str, size: int, timeout_s: float, setting: str = "reward.timeout_s"
) -> reward_function.RewardFailure:
    """The failure of a call on `size` completions that gave no answer by its deadline."""
    silent = f"reward {name!r} gave no answer for {counted(size, 'completion')}"
    way_out = f"make it faster, or raise {setting}"
    text = f"{silent} within {timeout_s:g} s; {way_out}"
    return reward_function.RewardFailure("deadline", text)


def text_of(error: BaseException) -> str:
    """The text of any exception on one line, cut; its `__str__` may fail.

    >>> text_of(ValueError("no judge\\nfor row 7"))
    'no judge for row 7'
    """
    try:
        words = " ".join(str(error).split())
    except BaseException as failed:  # a user's exception may fail in any way
        return f"(its text can't be made: {type(failed).__name__})"
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


# All rows together, and single ones where that fails, to find out which of them are at fault.

OnError: TypeAlias = Literal["drop", "zero", "fail"]

logger = logging.getLogger("engine.rewards")


def score(
    scorer: RewardScorer,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[object]],
    timeout_s: float,
    on_error: OnError = "fail",
    *,
    first_row: int = 0,
) -> reward_function.Scores:
    """Score B completions within `timeout_s` seconds, or twice that where some of them fail.

    `columns` are the rows' other columns, `ground_truth` among them. Where the call on all rows
    raises, hangs or returns a malformed result (other components than before, say), each row is
    scored by itself, so that only those at fault have no score; a value that isn't finite costs its
    row and no further call. Failures are logged as one warning. With `on_error="fail"` the first
    one raises RewardError, as do columns that don't fit the completions. Messages count rows from
    `first_row`.
    """
    numbers = range(first_row, first_row + len(completions))
    rows = RewardRows(prompts, completions, columns, numbers)
    if not len(rows):
        return reward_function.Scores(scorer.components, [], {})
    scores, batch_failure = score_rows(scorer, rows, timeout_s, on_error)
    if on_error == "fail" and scores.failures:
        raise scores.failures[min(scores.failures)]
    if batch_failure is not None or scores.failures:
        _log(scorer.name, scores, batch_failure, on_error, first_row)
    return scores


def score_rows(
    scorer: RewardScorer, rows: RewardRows, timeout_s: float, on_error: OnError = "drop"
) -> tuple[reward_function.Scores, reward_function.RewardFailure | None]:
    """All rows in one call, or each by itself where that fails; and how it did, if so."""
    try:
        scores = scorer.score_all(rows, timeout_s)
        _settle_components(scorer, scores)
        return scores, None
    except reward_function.RewardFailure as failure:
        if on_error == "fail":
            raise
        if len(rows) == 1:
            return reward_function.Scores.of(scorer.components, {}, {0: failure}), failure
        return score_single_rows(scorer, rows, timeout_s), failure


def score_single_rows(
    scorer: RewardScorer, rows: RewardRows, timeout_s: float
) -> reward_function.Scores:
    """Score each row by itself, all within one deadline; a row that hangs fails."""
    single_rows = {row: rows.select([row]) for row in range(len(rows))}
    results = scorer.score_each(single_rows, timeout_s)
    values: dict[int, list[float]] = {}
    failures: dict[int, reward_function.RewardFailure] = {}
    for row in single_rows:
        result = results.get(row) or late(scorer.name, 1, timeout_s)
        try:
            if isinstance(result, reward_function.RewardFailure):
                raise result
            _settle_components(scorer, result)
            if result.failures:
                raise result.failures[0]
            values[row] = result.rows[0]
        except reward_function.RewardFailure as failure:
            failures[row] = failure
    return reward_function.Scores.of(scorer.components, values, failures)


def _settle_components(scorer: RewardScorer, scores: reward_function.Scores) -> None:
    """Hold a reward to its components: those that were declared, or that its first result has."""
    if scores.components is not None:
        reward_function.require_components(scorer.name, scores.components, scorer.components)
        scorer.components = scores.components


def _log(
    name: str,
    scores: reward_function.Scores,
    batch_failure: reward_function.RewardFailure | None,
    on_error: OnError,
    first_row: int,
) -> None:
    """One warning a batch: how many failed and why, what becomes of them, the first traceback."""
    failures, size = scores.failures, len(scores.rows)
    message = (
        f"reward {name!r} failed for all {size} completions at once, though for none by itself"
    )
    reason = batch_failure
    if failures:
        first = min(failures)
        causes = Counter(failures[row].cause for row in sorted(failures))
        message = (
            f"reward {name!r} failed for {len(failures)} of {size} completions "
            f"({', '.join(f'{cause} {count}' for cause, count in causes.items())}), which "
            f"{'are left out of learning' if on_error == 'drop' else 'score 0'} "
            f"(reward.on_error={on_error}); first, completion {first_row + first}"
        )
        reason = failures[first]
    raised = (f.__cause__ for f in [*failures.values(), batch_failure] if f and f.__cause__)
    logger.warning("%s: %s", message, reason, exc_info=next(raised, None))


# In the reward's process. The first message has the arguments of `RewardService`, which answers
# with the reward's name and components. Each further one is (rows, timeout_s, tick_s), which
# `RewardThreads.events` answers.


class RewardService:
    """The function, and whether it has drawn from the random generators."""

    def __init__(self, load: Mapping[str, Any], channel: Connection) -> None:
        name, memory_bytes = load["name"], load["memory_bytes"]
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        if ":" not in name:
            reward_function.import_reward(name, load["modules"])
        function = reward_function.resolve_reward(name, load["options"])
        self._threads = RewardThreads(function, reward_function.declared_components(name), _seed)
        self._channel = channel
        self._draws = False
        self.loaded = self._threads.name, self._threads.components

    def run(self) -> None:
        """Answer requests until the other end closes."""
        with suppress(EOFError):
            while True:
                rows, timeout_s, tick_s = self._channel.recv()
                if len(rows) == 1:
                    _seed(*rows.values())
                before = _generator_states()
                at_once = 1 if self._draws else AT_ONCE  # draws depend on the order of calls
                for event in self._threads.events(rows, timeout_s, at_once, tick_s):
                    self._channel.send(event)
                if len(rows) == 1 and not self._draws:
                    self._draws = _generator_states() != before
                sys.stdout.flush()


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
            f"reward {name!r}", "engine.rewards.calls:RewardService", imports
        )
        try:
            loaded: Any = self._process.start(self._load)
        except WorkerError as error:
            raise RewardError(str(error)) from None
        self.name, self.components = loaded

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """Score rows; each that is under way when the process is lost is tried alone after it."""
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

    def _restart(self) -> reward_function.RewardFailure | None:
        """Start the process if it isn't there; why it can't be, if so."""
        try:
            if not self._process.running:
                self._process.start(self._load)
        except (WorkerError, ConfigError) as error:
            return reward_function.RewardFailure("crashed", str(error))
        return None

    def _score_group(
        self,
        rows: Mapping[int, RewardRows],
        deadline: float,
        patience_s: float,
        started: set[int],
        results: dict[int, RowResult],
    ) -> reward_function.RewardFailure | None:
        """Score rows in the process, into `results`; why it was lost, if it was."""
        if failure := self._restart():
            return failure
        request = rows, round(deadline - time.monotonic(), 2), patience_s / 4
        try:
            self._process.send(request, min(deadline, time.monotonic() + patience_s))
            while not rows.keys() <= results.keys():
                message: Any = self._process.receive(min(deadline, time.monotonic() + patience_s))
                if isinstance(message, ProcessEnded):
                    lost = reward_function.RewardFailure(
                        "crashed",
                        f"the process of reward {self.name!r} {message.how} while it scored "
                        f"{counted(max(map(len, rows.values())), 'completion')}",
                    )
                    lost.__cause__ = RuntimeError(message.stderr) if message.stderr else None
                    return lost
                key, result = message
                if result is not None:
                    results[key] = result
                elif key in rows:
                    started.add(key)
        except TooLate:
            self._process.end()  # what hangs must not go on beside the next call
            if time.monotonic() < deadline:
                return late(self.name, 1, patience_s)
        return None


MEMORY_BYTES = 4 << 30  # address space of a process; what needs more has no score
_MOST_PROCESSES = 8  # unless asked for


class RewardPool(RewardScorer):
    """Calls a registered reward on single rows, each with a deadline, in several processes.

    A completion that takes too long costs its process, which is forked again with all modules
    loaded, and no other completion. The processes start with the first call.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object] | None,
        entry: reward_function.RegisteredReward,
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

    def score_all(self, rows: RewardRows, timeout_s: float) -> reward_function.Scores:
        return score_single_rows(self, rows, timeout_s)

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        def scored(row: RewardRows) -> RowResult | None:
            limit_s = min(deadline - time.monotonic(), self._limit_s)
            if limit_s <= 0:
                return None
            process = self._take()
            try:
                return process.score_all(row, limit_s)
            except reward_function.RewardFailure as failure:
                if failure.cause == "deadline" and limit_s == self._limit_s:
                    return late(self.name, 1, limit_s, "reward.sample_timeout_s")
                return failure
            finally:
                self._free.append(process)

        count = min(self._size, len(rows))
        with ThreadPoolExecutor(count) as threads:
            self._free += list(threads.map(lambda _: self._take(), range(count)))
            deadline = time.monotonic() + timeout_s
            results = zip(rows, threads.map(scored, rows.values()), strict=True)
            return {row: result for row, result in results if result is not None}

    def close(self) -> None:
        """End all processes and what they left behind."""
        while self._free:
            self._free.pop().close()

    def _take(self) -> RewardProcess:
        """A process that is there, or one that is started now."""
        with suppress(IndexError):
            return self._free.pop()
        return RewardProcess(self.name, self._options, (self._module,), self._imports, MEMORY_BYTES)
