"""An evaluation as one HTML page that needs nothing else: for report.html and for a Flyte Deck.

The page's words, tables and look are in `templates/`, its pictures are drawn in `plots`. Every
text from data is escaped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment

from engine import html_templates
from engine.evaluation import plots
from engine.evaluation.lm_eval import HarnessScore
from engine.evaluation.policy_steps import Overoptimisation
from engine.evaluation.results import check_paired
from engine.evaluation.summary import EvaluatedSet, EvaluationComparison, Part

if TYPE_CHECKING:
    from engine.rewards.audit import RewardAudit

_MODEL_TITLES = {
    "warm_start": "warm start", "start_model": "start model", "rl": "RL model",
    "preference": "preference model", "champion": "champion",
}  # fmt: skip


class Link(NamedTuple):
    """A fact that leads to another page."""

    text: str
    href: str


class Verdict(NamedTuple):
    """The decision of promotion about the evaluated model."""

    promoted: bool
    title: str  # e.g. "hybridflyte-policy version 3 is now champion"
    reason: str


def render_report(
    comparison: EvaluationComparison,
    rows_before: pd.DataFrame,
    rows_after: pd.DataFrame,
    facts: Mapping[str, str | Link] | None = None,
    curves: Mapping[str, Sequence[float]] | None = None,
    verdict: Verdict | None = None,
    harness: Sequence[tuple[HarnessScore, HarnessScore]] = (),
    examples: int = 4,
    before: str = "",
    after: str = "",
    sets: Sequence[EvaluatedSet] = (),
    overoptimisation: Overoptimisation | None = None,
    audits: Mapping[str, RewardAudit] | None = None,
    drift: Mapping[str, str] | None = None,
) -> str:
    """Return the page; DataError when the two tables are not of the same problems.

    facts: shown on top, by label. curves: one value a training step, by metric. harness: both
    models' scores in the lm-evaluation-harness. examples: problems shown of each kind, drawn with
    the comparison's seed. before, after: what the models are, e.g. `start_model` without a warm
    start; empty: what their tables say. audits: of the scorers, by who scores. drift: sentences on
    signals of drift, by name.
    """
    check_paired(rows_before, rows_after)
    models = (comparison.before, comparison.after)
    first, second = before or models[0].model, after or models[1].model
    names = (_MODEL_TITLES.get(first, first), _MODEL_TITLES.get(second, second))
    lines = {k: {after: dict(enumerate(v, 1))} for k, v in (curves or {}).items() if len(v)}
    old_lengths, new_lengths = (rows["response_length"] for rows in (rows_before, rows_after))
    return _templates().get_template("report.html.j2").render(
        comparison=comparison, facts=facts or {}, harness=harness, models=models, names=names,
        parts=_parts(sets), sets=sets, verdict=verdict, css=html_templates.stylesheet(),
        groups=_example_groups(comparison, rows_before, rows_after, examples),
        bars=plots.metric_bars(comparison, names), curves=plots.curves(lines),
        lengths=plots.length_histogram(old_lengths, new_lengths, names),
        audits=audits or {}, drift=drift or {}, overoptimisation=overoptimisation
        and (plots.overoptimisation(overoptimisation), overoptimisation.sentence()),
    )  # fmt: skip


@functools.cache
def _templates() -> Environment:
    environment = html_templates.environment(__package__)
    environment.filters |= {
        "percent": _percent,
        "points": _points,
        "ends": lambda rate: f"[{_percent(rate.low)}, {_percent(rate.high)}]",
        "gain_ends": lambda gain: f"[{_points(gain.low)}, {_points(gain.high)}]",
        # A harness's score need not be a fraction.
        "plain_ends": lambda ends: f"[{ends.low:.4g}, {ends.high:.4g}]" if ends else "",
    }
    return environment


def _parts(sets: Sequence[EvaluatedSet]) -> list[dict[str, object]]:
    """The rows of the table by set, source and level; none where that is a single one."""
    rows: list[dict[str, object]] = []

    def add(kind: str, name: str, note: str, part: EvaluationComparison | Part) -> None:
        models = (part.before, part.after)
        cells = {"models": models, "gain": part.gain, "problems": part.problems}
        rows.append({"kind": kind, "name": name, "note": note, **cells})

    for evaluated in sets:
        add("set", evaluated.name, f"{evaluated.known:,} known from training", evaluated.comparison)
        for part in evaluated.proper_parts:
            add("level" if part.level else "source", part.level or part.source, "", part)
    return rows if len(rows) > 1 else []


def _example_groups(
    comparison: EvaluationComparison, before: pd.DataFrame, after: pd.DataFrame, examples: int
) -> list[dict[str, object]]:
    """Problems fixed, broken and still wrong, at most `examples` of each."""
    was, now = before["greedy_correct"].to_numpy(), after["greedy_correct"].to_numpy()
    kinds = (
        ("Fixed", "wrong before, right now", ~was & now),
        ("Broken", "right before, wrong now", was & ~now),
        ("Still wrong", "wrong before and now", ~was & ~now),
    )
    generator = np.random.default_rng(comparison.seed)
    groups: list[dict[str, object]] = []
    for title, meaning, mask in kinds:
        rows = np.sort(generator.permutation(np.flatnonzero(mask))[:examples])
        problems = [_example(before.iloc[row], after.iloc[row]) for row in rows]
        count = int(mask.sum())
        groups.append({"title": title, "meaning": meaning, "count": count, "examples": problems})
    return groups


def _example(before: pd.Series, after: pd.Series) -> dict[str, object]:
    answers = [
        {
            "completion": row["greedy_completion"],
            "text": "no answer" if pd.isna(row["greedy_answer"]) else str(row["greedy_answer"]),
            "correct": bool(row["greedy_correct"]),
        }
        for row in (before, after)
    ]
    return {**before[["prompt", "ground_truth"]], "answers": answers}


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")
