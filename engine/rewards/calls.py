"""Calls of a reward function, which can't hang a run, end it, or corrupt a batch.

`score` is the front door: all rows in one call, and each by itself where that fails, so that only
the rows at fault have no score. It is given a `RewardScorer`; `RewardThreads` is the one that calls
a function on threads of this process, `process` has those in processes of their own.
"""

from __future__ import annotations

import asyncio
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

    def select(self, indices: Sequence[int]) -> RewardRows:
        """Return the rows at `indices`, in that order."""
        return RewardRows(
            [self.prompts[i] for i in indices],
            [self.completions[i] for i in indices],
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
        )


# One call on a daemon thread, for which Python doesn't wait at its exit. Nothing can stop a plain
# function in this process: one that hangs is given up, and stays on its thread until it returns.


def on_daemon_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call a function on a thread of its own; whatever it raises is the future's."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # SystemExit, say, must not end more than the call
            future.set_exception(error)

    threading.Thread(target=work, name=getattr(function, "__name__", ""), daemon=True).start()
    return future


class _DaemonThreads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs: asyncio takes nothing but a ThreadPoolExecutor."""

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


def call_reward(function: RewardFunction, rows: RewardRows, deadline: float) -> object:
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

RowResult: TypeAlias = Scores | RewardFailure


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
class RowsStarted:
    """The call on rows, of one or of several, began."""

    key: int


@dataclass(frozen=True, slots=True)
class RowsEnded:
    """The call on rows ended."""

    key: int
    result: RowResult

    def scores(self) -> Scores:
        """The scores; raise the RewardFailure where there are none."""
        if isinstance(self.result, RewardFailure):
            raise self.result
        return self.result


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
        for event in self.events({0: rows}, timeout_s, components=components):
            if isinstance(event, RowsEnded):
                return event.scores()
        raise late(self.name, len(rows), timeout_s)

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        events = self.events(rows, timeout_s)
        return {event.key: event.result for event in events if isinstance(event, RowsEnded)}

    def events(
        self,
        rows: Mapping[int, RewardRows],
        timeout_s: float,
        *,
        components: tuple[str, ...] | None = None,
        at_once: int = AT_ONCE,
        tick_s: float = float("inf"),
    ) -> Iterator[RowsStarted | RowsEnded | None]:
        """Call the reward on each entry of `rows`, side by side; yield what began and ended.

        The threads are at most `at_once * (TURNS + 1)`: a call that takes long gives its turn to
        the next but may still end, so a few that hang don't keep the others from being scored.
        None comes after `tick_s` in which nothing happened.
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
                yield RowsStarted(key)
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
                yield None
                continue
            turns.pop(key, None)
            under_way -= 1
            try:
                result: RowResult = self._read(call, len(rows[key]), timeout_s, components, key)
            except RewardFailure as failure:
                result = failure
            yield RowsEnded(key, result)

    def close(self) -> None:
        """Nothing is left to end: what still runs has been given up."""

    def _read(
        self,
        call: Future[object],
        size: int,
        timeout_s: float,
        components: tuple[str, ...] | None,
        first_row: int,
    ) -> Scores:
        """Read a call's result; raise RewardFailure for an error in its place."""
        error = call.exception()
        if isinstance(error, DeadlinePassed):
            raise late(self.name, size, timeout_s)
        if isinstance(error, RewardError):  # it says what is wrong by itself
            raise RewardFailure("raised", text_of(error)) from error
        if error is not None:
            raise RewardFailure(
                "raised", f"reward {self.name!r} raised {type(error).__name__}: {text_of(error)}"
            ) from error
        result = call.result()
        try:
            return read(self.name, result, size, components, first_row)
        except RewardFailure:
            raise
        except Exception as failed:  # any object may be here, and fail in its own way
            raise RewardFailure(
                "malformed",
                f"reward {self.name!r} returned {type(result).__name__}, which can't "
                f"be read ({type(failed).__name__}: {text_of(failed)}); return a plain list",
            ) from failed


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


# All rows together, and single ones where that fails, to find out which of them are at fault.

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
        return score_single_rows(scorer, rows, timeout_s, components), failure


def score_single_rows(
    scorer: RewardScorer,
    rows: RewardRows,
    timeout_s: float,
    components: tuple[str, ...] | None,
) -> Scores:
    """Score each row by itself, all within one deadline; a row that hangs fails."""
    results = scorer.score_each({row: rows.row(row) for row in range(len(rows))}, timeout_s)
    values: dict[int, list[float]] = {}
    failures: dict[int, RewardFailure] = {}
    for row in range(len(rows)):
        result = results.get(row) or late(scorer.name, 1, timeout_s)
        try:
            if isinstance(result, RewardFailure):
                raise result
            require_components(scorer.name, result.components, components)
            components = result.components  # the first row with a result settles them for all
            if result.failures:
                raise result.failures[0]
            values[row] = result.rows[0]
        except RewardFailure as failure:
            failures[row] = failure
    return Scores.of(components, values, failures)


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
