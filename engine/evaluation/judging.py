"""Completions judged by the run's scorer: from texts and the rows they answer to `Judged`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.evaluation.rows import Judged
from engine.rewards import Scorer, Scores

AT_ONCE = 256  # completions in one call of the scorer, which has a deadline


def judge(
    scorer: Scorer,
    texts: Sequence[str],
    tokens: Sequence[int],
    truncated: Sequence[bool],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> list[Judged]:
    """Judge B completions to B prompts (the texts of their last messages), with B of each column.

    One that can't be scored is wrong, and marked; with `on_error: fail` RewardError is raised.
    """
    judged: list[Judged] = []
    on_error = "fail" if scorer.config.on_error == "fail" else "zero"
    for start in range(0, len(texts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        some = {name: values[part] for name, values in columns.items()}
        scores = scorer.score(prompts[part], texts[part], some, on_error)  # type: ignore[arg-type]
        judged += _judged(scorer, scores, texts[part], tokens[part], truncated[part], some)
    return judged


def _judged(
    scorer: Scorer,
    scores: Scores,
    texts: Sequence[str],
    tokens: Sequence[int],
    truncated: Sequence[bool],
    columns: Mapping[str, Sequence[Any]],
) -> list[Judged]:
    sources = columns.get("data_source", [""] * len(texts))
    answers, readable = scorer.answers(texts, sources)
    right, totals = scorer.correct(scores, sources), scorer.totals(scores)
    kept = _kept(scorer, scores, texts, sources)
    return [
        Judged(
            text=text,
            tokens=tokens[i],
            truncated=truncated[i],
            correct=right[i],
            score=totals[i],
            answer=answers[i],
            vote=answers[i] if readable else text.strip(),
            well_formed=kept[i],
            failed=i in scores.failures,
        )
        for i, text in enumerate(texts)
    ]


def _kept(
    scorer: Scorer, scores: Scores, texts: Sequence[str], sources: Sequence[object]
) -> list[bool]:
    """Which keep the format: by a component `format`, or as the rewards' rules say."""
    names = scores.components or ()
    if "format" in names:
        return [row[names.index("format")] >= 1 for row in scores.rows]
    return scorer.well_formed(texts, sources) or [True] * len(texts)
