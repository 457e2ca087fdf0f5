"""An evaluation as one HTML page that needs nothing else: for report.html and for a Flyte Deck.

The page's words, tables and look are in `templates/`, its pictures are drawn in `plots`. Every
text
from data is escaped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jinja2 import Environment

from engine import html_templates
from engine.evaluation import plots
from engine.evaluation.lm_eval import HarnessScore
from engine.evaluation.metrics import Interval
from engine.evaluation.policy_steps import Overoptimisation
from engine.evaluation.results import check_paired
from engine.evaluation.summary import EvaluatedSet, EvaluationComparison, ModelSummary

_MODEL_TITLES = {
    "warm_start": "warm start",
    "start_model": "start model",
    "rl": "RL model",
    "preference": "preference model",
    "champion": "champion",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A fact that leads to another page."""

    text: str
    href: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What promotion decided about the evaluated model."""

    promoted: bool
    title: str  # e.g. "hybridflyte-policy version 3 is now champion"
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One model's greedy answer to a problem."""

    completion: str
    text: str  # the answer read from it, or "no answer"
    correct: bool


@dataclass(frozen=True, slots=True)
class ReportExample:
    """A problem with both models' answers."""

    prompt: str
    ground_truth: str
    answers: tuple[Answer, Answer]  # before, after


@dataclass(frozen=True, slots=True)
class ReportPart:
    """A set, source or level with both models' metrics."""

    kind: str  # "set", "source" or "level"
    name: str
    problems: int
    note: str
    models: tuple[ModelSummary, ModelSummary]  # before, after
    gain: Interval | None


@dataclass(frozen=True, slots=True)
class ExampleGroup:
    """Some of the problems on which the two models did alike."""

    title: str  # e.g. "Fixed"
    meaning: str  # e.g. "wrong before, right now"
    count: int  # of all such problems
    examples: tuple[ReportExample, ...]


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
) -> str:
    """Return the page.

    facts: label → value, shown on top (run id, data, model, …). curves: metric → one value a
    training step. verdict: what promotion decided; None before it. harness: both models' scores in
    the lm-evaluation-harness. examples: problems shown of each kind, drawn with the comparison's
    seed. before: what the first model is, `start_model` where there was no warm start; empty: what
    its table says. after: the same of the second, `preference` for preference learning. sets: every
    evaluation set, for the table by set, source and level. overoptimisation: of RL by a reward
    model. Raises DataError when the two tables are not of the same problems.
    """
    check_paired(rows_before, rows_after)
    models = (comparison.before, comparison.after)
    names = (_title(before or comparison.before.model), _title(after or comparison.after.model))
    curves = {name: values for name, values in (curves or {}).items() if len(values)}
    lengths_before = rows_before["response_length"].to_numpy()
    lengths_after = rows_after["response_length"].to_numpy()
    page = _templates().get_template("report.html.j2")
    return page.render(
        bars=plots.metric_bars(comparison, names),
        comparison=comparison,
        css=html_templates.asset(__package__, "report.css"),
        curves=plots.training_curves(curves),
        facts=facts or {},
        groups=_example_groups(comparison, rows_before, rows_after, examples),
        harness=harness,
        lengths=plots.length_histogram(lengths_before, lengths_after, names),
        models=models,
        names=names,
        overoptimisation=overoptimisation
        and (plots.overoptimisation(overoptimisation), overoptimisation.sentence()),
        parts=_parts(sets),
        sets=sets,
        verdict=verdict,
    )


@functools.cache
def _templates() -> Environment:
    environment = html_templates.environment(__package__)
    environment.filters |= {
        "percent": _percent,
        "points": _points,
        "ends": _ends,
        "gain_ends": _gain_ends,
        "plain_ends": _plain_ends,
    }
    return environment


def _parts(sets: Sequence[EvaluatedSet]) -> list[ReportPart]:
    """The rows of the table by set, source and level; none where that is a single one."""
    rows: list[ReportPart] = []
    for one in sets:
        whole = one.comparison
        known = f"{one.known:,} known from training"
        both = (whole.before, whole.after)
        rows.append(ReportPart("set", one.name, whole.problems, known, both, whole.gain))
        for part in one.proper_parts:
            kind, name = ("level", part.level) if part.level else ("source", part.source)
            both = (part.before, part.after)
            rows.append(ReportPart(kind, name, part.problems, "", both, part.gain))
    return rows if len(rows) > 1 else []


def _example_groups(
    comparison: EvaluationComparison, before: pd.DataFrame, after: pd.DataFrame, examples: int
) -> list[ExampleGroup]:
    """Problems fixed, broken and still wrong, at most `examples` of each."""
    was, now = before["greedy_correct"].to_numpy(), after["greedy_correct"].to_numpy()
    kinds = (
        ("Fixed", "wrong before, right now", ~was & now),
        ("Broken", "right before, wrong now", was & ~now),
        ("Still wrong", "wrong before and now", ~was & ~now),
    )
    generator = np.random.default_rng(comparison.seed)
    groups = []
    for title, meaning, mask in kinds:
        found = np.flatnonzero(mask)
        shown = np.sort(generator.permutation(found)[:examples])
        chosen = tuple(_example(before.iloc[row], after.iloc[row]) for row in shown)
        groups.append(ExampleGroup(title, meaning, found.size, chosen))
    return groups


def _example(before: pd.Series, after: pd.Series) -> ReportExample:
    return ReportExample(
        before["prompt"], before["ground_truth"], (_answer(before), _answer(after))
    )


def _answer(row: pd.Series) -> Answer:
    missing = pd.isna(row["greedy_answer"])
    text = "no answer" if missing else str(row["greedy_answer"])
    return Answer(row["greedy_completion"], text, bool(row["greedy_correct"]))


def _title(model: str) -> str:
    return _MODEL_TITLES.get(model, model)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def _ends(interval: Interval) -> str:
    return f"[{_percent(interval.low)}, {_percent(interval.high)}]"


def _gain_ends(interval: Interval) -> str:
    return f"[{_points(interval.low)}, {_points(interval.high)}]"


def _plain_ends(interval: Interval | None) -> str:
    """Ends of a score that need be no fraction; empty without an interval."""
    return f"[{interval.low:.4g}, {interval.high:.4g}]" if interval is not None else ""
