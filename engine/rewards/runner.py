"""Scoring completions so that a reward function can't hang a run, end it, or corrupt a batch.

What lives here: the call on all rows, and the calls on single rows that find out which of them
are at fault. What does not: what becomes of rows without a score (`engine.workers.reward`).
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from engine.errors import RewardError
from engine.rewards.call import DeadlinePassed, RewardCall, RewardOutcome, RewardRows
from engine.rewards.protocol import RewardFunction
from engine.rewards.result import RewardFailure, Scores, read

OnError: TypeAlias = Literal["drop", "zero", "fail"]

logger = logging.getLogger("engine.rewards")

_AT_ONCE = 16  # single rows that are scored side by side
_TURNS = 8  # a row that takes more than 1/8 of the time no longer keeps others waiting


def score(
    reward_fn: RewardFunction,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
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
    name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
    whole: RewardFailure | None = None
    if not len(rows):
        return Scores(components, [], {})
    try:
        scores = _all_at_once(name, reward_fn, rows, timeout_s, components)
    except RewardFailure as failure:
        if on_error == "fail":
            raise
        whole = failure
        if len(rows) == 1:
            scores = Scores.of(components, {}, {0: failure})
        else:
            scores = _one_by_one(name, reward_fn, rows, timeout_s, components)
    if on_error == "fail" and scores.failures:
        raise scores.failures[min(scores.failures)]
    if whole is not None or scores.failures:
        _log(name, scores, whole, on_error)
    return scores


def _all_at_once(
    name: str,
    reward_fn: RewardFunction,
    rows: RewardRows,
    timeout_s: float,
    components: tuple[str, ...] | None,
) -> Scores:
    """One call on all rows; raise RewardFailure where it fails as a whole."""
    outcomes: queue.SimpleQueue[RewardOutcome] = queue.SimpleQueue()
    call = RewardCall(reward_fn, rows, time.monotonic() + timeout_s, outcomes)
    try:
        outcome = outcomes.get(timeout=timeout_s)
    except queue.Empty:
        call.abandon()
        raise _late(name, len(rows), timeout_s) from None
    return _read(name, outcome, len(rows), timeout_s, components)


def _one_by_one(
    name: str,
    reward_fn: RewardFunction,
    rows: RewardRows,
    timeout_s: float,
    components: tuple[str, ...] | None,
) -> Scores:
    """Score each row by itself, all within one deadline; a row that hangs fails."""
    outcomes = _outcomes(reward_fn, rows, timeout_s)
    found: dict[int, list[float]] = {}
    failures: dict[int, RewardFailure] = {}
    for row in range(len(rows)):
        try:
            if row not in outcomes:
                raise _late(name, 1, timeout_s)
            one = _read(name, outcomes[row], 1, timeout_s, components, row)
        except RewardFailure as failure:
            failures[row] = failure
            continue
        components = one.components  # the first row with a result settles them for the others
        if one.failures:
            failures[row] = one.failures[0]
        else:
            found[row] = one.rows[0]
    return Scores.of(components, found, failures)


def _outcomes(
    reward_fn: RewardFunction, rows: RewardRows, timeout_s: float
) -> dict[int, RewardOutcome]:
    """Call the reward on single rows, side by side; return what ended by the deadline.

    The threads are at most `_AT_ONCE * (_TURNS + 1)`: a row that takes long gives its turn to the
    next but may still end, so a few that hang don't keep the others from being scored.
    """
    deadline = time.monotonic() + timeout_s
    outcomes: queue.SimpleQueue[RewardOutcome] = queue.SimpleQueue()
    waiting = deque(range(len(rows)))
    turns: dict[int, float] = {}  # row → when its turn is over
    calls: dict[int, RewardCall] = {}
    ended: dict[int, RewardOutcome] = {}
    while waiting or calls:
        now = time.monotonic()
        turns = {row: until for row, until in turns.items() if until > now}
        while waiting and len(turns) < _AT_ONCE and now < deadline:
            row = waiting.popleft()
            calls[row] = RewardCall(reward_fn, rows.row(row), deadline, outcomes, row)
            turns[row] = now + timeout_s / _TURNS
        wake = min([deadline, *turns.values()]) if waiting else deadline
        try:
            outcome = outcomes.get(timeout=max(wake - time.monotonic(), 0.0))
        except queue.Empty:
            if time.monotonic() >= deadline:
                break
            continue
        ended[outcome.row] = outcome
        turns.pop(outcome.row, None)
        del calls[outcome.row]
    for call in calls.values():
        call.abandon()
    return ended


def _read(
    name: str,
    outcome: RewardOutcome,
    size: int,
    timeout_s: float,
    components: tuple[str, ...] | None,
    first_row: int = 0,
) -> Scores:
    """Read a result; raise RewardFailure for an error in its place."""
    error = outcome.error
    if error is None:
        return read(name, outcome.result, size, components, first_row)
    if isinstance(error, DeadlinePassed):
        raise _late(name, size, timeout_s)
    if isinstance(error, RewardError):  # it says what is wrong by itself
        raise RewardFailure("raised", str(error)) from error
    raise RewardFailure(
        "raised", f"reward {name!r} raised {type(error).__name__}: {error}"
    ) from error


def _late(name: str, size: int, timeout_s: float) -> RewardFailure:
    what = f"{size} completions" if size > 1 else "a completion"
    return RewardFailure(
        "deadline",
        f"reward {name!r} gave no answer for {what} within {timeout_s:g} s; "
        "make it faster, or raise reward.timeout_s",
    )


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
