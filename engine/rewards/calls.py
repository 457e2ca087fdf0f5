"""Calls of a reward function in this process, which can't hang a run, end it, or corrupt a batch.

One call on a thread with a deadline, calls on all rows or on each, and scoring of completions
with them.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from engine.errors import RewardError
from engine.rewards.reward_function import (
    RewardFailure,
    RewardFunction,
    Scores,
    read,
    require_components,
)

# One call of a reward function, on a daemon thread of its own and with a deadline.
#
# What lives here: starting a call, running coroutines, giving up on what hangs. What does not:
# what
# a result must look like (`result`) and what is done about a failure (`runner`).

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardRows:
    """What a reward function is given: B prompts, completions, and entries of each column."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[object]]

    def __post_init__(self) -> None:
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

    def row(self, index: int) -> RewardRows:
        """Return row `index` as rows of its own (B = 1)."""
        return self.select([index])

    def select(self, places: Sequence[int]) -> RewardRows:
        """Return the rows at `places`, in that order."""
        columns = {name: [values[i] for i in places] for name, values in self.columns.items()}
        prompts, completions = (
            [some[i] for i in places] for some in (self.prompts, self.completions)
        )
        return RewardRows(prompts, completions, columns)


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What a call ended with: a result or an error. A call that hangs has none."""

    row: int
    result: object = None
    error: BaseException | None = None


class DeadlinePassed(Exception):
    """Our own deadline, as distinct from a TimeoutError that the reward raised."""


class RewardCall:
    """A call under way; its outcome goes to a queue.

    A coroutine is cancelled at `deadline` (on `time.monotonic`'s clock). A plain function is not,
    as nothing can stop one for certain: whoever waits for it decides when to `abandon` it.
    """

    def __init__(
        self,
        function: RewardFunction,
        rows: RewardRows,
        deadline: float,
        outcomes: queue.SimpleQueue[RewardOutcome],
        row: int = 0,
    ) -> None:
        self._function, self._deadline = function, deadline
        self._outcomes, self._row = outcomes, row
        # Lists of its own: a function may empty them, and the rows may be needed again.
        self._prompts, self._completions = list(rows.prompts), list(rows.completions)
        self._columns = {name: list(values) for name, values in rows.columns.items()}
        self._lock = threading.Lock()
        self._stoppable = True
        self._thread = threading.Thread(target=self._run, name=f"reward-{row}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Make a hung function end when it next executes Python code, so that it can't spin on.

        One that sleeps inside C code stays, on a daemon thread, until that code returns.
        Coroutines are left to their cancellation.
        """
        with self._lock:  # while we hold it, the thread lives and its ident is its own
            if self._stoppable and self._thread.ident is not None:
                ident = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def _run(self) -> None:
        try:
            result: object = self._function(self._prompts, self._completions, **self._columns)
            self._not_stoppable()
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result, self._deadline))
            outcome = RewardOutcome(self._row, result)
        except BaseException as error:  # whatever it is, it must not end the run in this thread
            self._not_stoppable()
            outcome = RewardOutcome(self._row, error=error)
        self._outcomes.put(outcome)

    def _not_stoppable(self) -> None:
        with self._lock:
            self._stoppable = False


async def _awaited(result: Awaitable[object], deadline: float) -> object:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_DaemonThreads())
    timeout = asyncio.timeout(deadline - time.monotonic())
    try:
        async with timeout:
            return await result
    except TimeoutError:
        if timeout.expired():
            raise DeadlinePassed from None
        raise


class _DaemonThreads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs: Python waits at its exit for a pool's threads, not for these.

    Asyncio accepts nothing but a ThreadPoolExecutor, so this is one by name alone.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._free = threading.BoundedSemaphore(32)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            with self._free:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # handed to whoever awaits it
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for nothing: what still runs has been given up."""


# Scoring in this process: one call on all rows, or one on each, on threads with a deadline.
#
# What lives here: who is called when, and the texts of failures. What does not: one call (`call`),
# the same in a process of its own (`process`), and what is done about failures (`runner`).

AT_ONCE = 16  # single rows that are scored side by side
TURNS = 8  # a row that takes more than 1/8 of the time no longer keeps others waiting
_LONGEST = 300  # characters of an exception's text

RowResult: TypeAlias = Scores | RewardFailure  # of one row


class RewardScorer(Protocol):
    """A reward function that is ready to be called, in this process or in one of its own."""

    name: str  # in messages, e.g. "my_rewards.by_length"

    @property
    def components(self) -> tuple[str, ...] | None:
        """Those that were declared; None: nothing is known."""
        ...

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        """One call on all rows; raise RewardFailure where it fails as a whole."""
        ...

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """A call on each row, by its number; those that ended by one common deadline."""
        ...

    def close(self) -> None:
        """End what runs; called once."""
        ...


@dataclass(frozen=True, slots=True)
class RowStarted:
    """The call on a row began."""

    row: int


@dataclass(frozen=True, slots=True)
class RowEnded:
    """The call on a row ended."""

    row: int
    result: RowResult


class RewardThreads:
    """Calls a reward on threads of this process; it keeps nothing between calls."""

    def __init__(
        self,
        function: RewardFunction,
        components: tuple[str, ...] | None = None,
        *,
        before_call: Callable[[RewardRows], None] | None = None,
    ) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.components = components
        self._function = function
        self._before_call = before_call or (lambda rows: None)

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        outcomes: queue.SimpleQueue[RewardOutcome] = queue.SimpleQueue()
        self._before_call(rows)
        call = RewardCall(self._function, rows, time.monotonic() + timeout_s, outcomes)
        try:
            outcome = outcomes.get(timeout=timeout_s)
        except queue.Empty:
            call.abandon()
            raise late(self.name, len(rows), timeout_s) from None
        return self._read(outcome, len(rows), timeout_s, components)

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        events = self.events(rows, timeout_s)
        return {event.row: event.result for event in events if isinstance(event, RowEnded)}

    def events(
        self,
        rows: Mapping[int, RewardRows],
        timeout_s: float,
        *,
        at_once: int = AT_ONCE,
        tick_s: float = float("inf"),
    ) -> Iterator[RowStarted | RowEnded | None]:
        """Call the reward on single rows, side by side; tell what began and ended.

        The threads are at most `at_once * (TURNS + 1)`: a row that takes long gives its turn to
        the next but may still end, so a few that hang don't keep the others from being scored.
        None comes after `tick_s` in which nothing happened.
        """
        deadline = time.monotonic() + timeout_s
        outcomes: queue.SimpleQueue[RewardOutcome] = queue.SimpleQueue()
        waiting = deque(rows)
        turns: dict[int, float] = {}  # row → when its turn is over
        calls: dict[int, RewardCall] = {}
        while waiting or calls:
            now = time.monotonic()
            turns = {row: until for row, until in turns.items() if until > now}
            while waiting and len(turns) < at_once and now < deadline:
                row = waiting.popleft()
                yield RowStarted(row)
                self._before_call(rows[row])
                calls[row] = RewardCall(self._function, rows[row], deadline, outcomes, row)
                turns[row] = now + timeout_s / TURNS
            wake = min([deadline, now + tick_s, *(turns.values() if waiting else ())])
            try:
                outcome = outcomes.get(timeout=max(wake - time.monotonic(), 0.0))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    break
                yield None
                continue
            turns.pop(outcome.row, None)
            del calls[outcome.row]
            yield RowEnded(outcome.row, self._row_result(outcome, timeout_s))
        for call in calls.values():
            call.abandon()

    def close(self) -> None:
        """Nothing is left to end: what still runs has been given up."""

    def _row_result(self, outcome: RewardOutcome, timeout_s: float) -> RowResult:
        try:
            return self._read(outcome, 1, timeout_s, None, outcome.row)
        except RewardFailure as failure:
            return failure

    def _read(
        self,
        outcome: RewardOutcome,
        size: int,
        timeout_s: float,
        components: tuple[str, ...] | None,
        first_row: int = 0,
    ) -> Scores:
        """Read a result; raise RewardFailure for an error in its place."""
        error = outcome.error
        if error is None:
            try:
                return read(self.name, outcome.result, size, components, first_row)
            except RewardFailure:
                raise
            except Exception as failed:  # any object may be here, and fail in its own way
                raise RewardFailure(
                    "malformed",
                    f"reward {self.name!r} returned {type(outcome.result).__name__}, which can't "
                    f"be read ({type(failed).__name__}: {text_of(failed)}); return a plain list",
                ) from failed
        if isinstance(error, DeadlinePassed):
            raise late(self.name, size, timeout_s)
        if isinstance(error, RewardError):  # it says what is wrong by itself
            raise RewardFailure("raised", text_of(error)) from error
        raise RewardFailure(
            "raised", f"reward {self.name!r} raised {type(error).__name__}: {text_of(error)}"
        ) from error


def late(
    name: str, size: int, timeout_s: float, setting: str = "reward.timeout_s"
) -> RewardFailure:
    """The failure of a call on `size` completions that gave no answer by its deadline."""
    what = f"{size} completions" if size > 1 else "a completion"
    return RewardFailure(
        "deadline",
        f"reward {name!r} gave no answer for {what} within {timeout_s:g} s; "
        f"make it faster, or raise {setting}",
    )


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


# Scoring completions so that a reward function can't hang a run, end it, or corrupt a batch.
#
# What lives here: when rows are called together, and when by themselves to find out which of them
# are
# at fault. What does not: the calls (`threads`, `process`), and what becomes of rows without a
# score
# (`engine.workers.reward`).

OnError: TypeAlias = Literal["drop", "zero", "fail"]

logger = logging.getLogger("engine.rewards")


def score(
    scorer: RewardScorer,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[object]],
    timeout_s: float,
    *,
    components: tuple[str, ...] | None = None,
    on_error: OnError = "fail",
) -> Scores:
    """Score B completions within `timeout_s` seconds, or twice that where some of them fail.

    `columns` are the rows' other columns, `ground_truth` among them; `components` the names that
    must come back (() for a plain list, None for any). Where the call on all rows raises, hangs
    or returns a malformed result, each row is scored by itself, so that only those at fault have
    no score; a value that isn't finite costs its row and no further call. Failures are logged as
    one warning. With `on_error="fail"` there is no second try and the first failure is raised.

    Raises RewardError then, and where columns don't fit the completions.
    """
    rows = RewardRows(prompts, completions, columns)
    if not len(rows):
        return Scores(components, [], {})
    if on_error == "fail":
        scores, whole = scorer.score_all(rows, timeout_s, components), None
    else:
        scores, whole = score_rows(scorer, rows, timeout_s, components)
    if on_error == "fail" and scores.failures:
        raise scores.failures[min(scores.failures)]
    if whole is not None or scores.failures:
        _log(scorer.name, scores, whole, on_error)
    return scores


def score_rows(
    scorer: RewardScorer,
    rows: RewardRows,
    timeout_s: float,
    components: tuple[str, ...] | None,
) -> tuple[Scores, RewardFailure | None]:
    """All rows in one call, or each by itself where that fails; and how it did, if so."""
    try:
        return scorer.score_all(rows, timeout_s, components), None
    except RewardFailure as failure:
        if len(rows) == 1:
            return Scores.of(components, {}, {0: failure}), failure
        return _one_by_one(scorer, rows, timeout_s, components), failure


def _one_by_one(
    scorer: RewardScorer,
    rows: RewardRows,
    timeout_s: float,
    components: tuple[str, ...] | None,
) -> Scores:
    """Score each row by itself, all within one deadline; a row that hangs fails."""
    results = scorer.score_each({row: rows.row(row) for row in range(len(rows))}, timeout_s)
    found: dict[int, list[float]] = {}
    failures: dict[int, RewardFailure] = {}
    for row in range(len(rows)):
        one = results.get(row) or late(scorer.name, 1, timeout_s)
        if isinstance(one, Scores):
            try:
                require_components(scorer.name, one.components, components)
            except RewardFailure as failure:
                one = failure
        if isinstance(one, RewardFailure):
            failures[row] = one
            continue
        components = one.components  # the first row with a result settles them for the others
        if one.failures:
            failures[row] = one.failures[0]
        else:
            found[row] = one.rows[0]
    return Scores.of(components, found, failures)


def _log(name: str, scores: Scores, whole: RewardFailure | None, on_error: OnError) -> None:
    """One warning a batch: how many failed and why, what becomes of them, the first traceback."""
    failures = [scores.failures[row] for row in sorted(scores.failures)]
    raised = next((f.__cause__ for f in [*failures, whole] if f and f.__cause__), None)
    if not failures:
        logger.warning(
            "reward %r failed for all %d completions at once, though for none by itself: %s",
            name,
            len(scores.rows),
            whole,
            exc_info=raised,
        )
        return
    causes = Counter(failure.cause for failure in failures)
    logger.warning(
        "reward %r failed for %d of %d completions (%s), which %s (reward.on_error=%s); "
        "first, completion %d: %s",
        name,
        len(failures),
        len(scores.rows),
        ", ".join(f"{cause} {count}" for cause, count in causes.items()),
        "are left out of learning" if on_error == "drop" else "score 0",
        on_error,
        min(scores.failures),
        failures[0],
        exc_info=raised,
    )
