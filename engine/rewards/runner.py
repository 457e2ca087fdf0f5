"""Scoring completions so that a reward function can't hang a run, end it, or corrupt a batch.

What lives here: when rows are called together, and when by themselves to find out which of them are
at fault. What does not: the calls (`threads`, `process`), and what becomes of rows without a score
(`engine.workers.reward`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from engine.rewards.call import RewardRows
from engine.rewards.result import RewardFailure, Scores, require_components
from engine.rewards.threads import RewardScorer, late

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
