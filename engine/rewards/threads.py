"""Scoring in this process: one call on all rows, or one on each, on threads with a deadline.

What lives here: who is called when, and the texts of failures. What does not: one call (`call`),
the same in a process of its own (`process`), and what is done about failures (`runner`).
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.errors import RewardError
from engine.rewards.call import DeadlinePassed, RewardCall, RewardOutcome, RewardRows
from engine.rewards.protocol import RewardFunction
from engine.rewards.result import RewardFailure, Scores, read

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
