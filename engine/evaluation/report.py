"""An evaluation as one HTML page that needs nothing else: for report.html and for a Flyte Deck.

Puts a `Comparison`, sample completions and training curves into words and tables; pictures are
drawn in `plots`, colours and spacing live in `report_style`. Every text from data is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from engine.evaluation import plots
from engine.evaluation.metrics import Interval
from engine.evaluation.report_style import CSS
from engine.evaluation.rows import check_paired
from engine.evaluation.summary import Comparison, ModelSummary

_MODEL_TITLES = {"warm_start": "warm start", "rl": "RL model", "champion": "champion"}
_LONGEST_TEXT = 4000  # characters of a prompt or completion that the page shows
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


def render_report(
    comparison: Comparison,
    rows_before: pd.DataFrame,
    rows_after: pd.DataFrame,
    facts: Mapping[str, str] | None = None,
    curves: Mapping[str, Sequence[float]] | None = None,
    examples: int = 4,
) -> str:
    """Return the page.

    facts: label → value, shown on top (run id, data, decision, …). curves: metric → one value a
    training step. examples: problems shown of each kind, drawn with the comparison's seed.
    Raises DataError when the two tables are not of the same problems.
    """
    check_paired(rows_before, rows_after)
    names = (_title(comparison.before.model), _title(comparison.after.model))
    curves = {name: values for name, values in (curves or {}).items() if len(values)}
    body = [
        _headline(comparison, names),
        _facts(facts or {}),
        _metric_table(comparison, names),
        _plots(comparison, rows_before, rows_after, names),
        _curves(curves),
        _examples(comparison, rows_before, rows_after, names, examples),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text('Evaluation: ' + names[1])}</title><style>{CSS}</style></head>\n"
        f'<body><div class="evaluation">{"".join(body)}</div></body></html>\n'
    )


def _headline(comparison: Comparison, names: tuple[str, str]) -> str:
    """Title, one sentence and the three numbers that matter."""
    before, after, gain = comparison.before.pass_at_1, comparison.after.pass_at_1, comparison.gain
    if gain.low > 0:
        verdict = "is better than"
    elif gain.high < 0:
        verdict = "is worse than"
    else:
        verdict = "can't be told from"
    level = f"{100 * comparison.confidence:g} %"
    cards = (
        ("", names[0], f"{_percent(before.mean)}<small> %</small>", _ends(before) + " %"),
        ("", names[1], f"{_percent(after.mean)}<small> %</small>", _ends(after) + " %"),
        ("gain", "gain, paired", f"{_points(gain.mean)}<small> points</small>", _gain_ends(gain)),
    )
    boxes = "".join(
        f'<div class="card {kind}"><span>{_text(label)}</span><b>{value}</b>'
        f"<span>{level} interval {ends}</span></div>"
        for kind, label, value, ends in cards
    )
    return (
        f"<h1>The {_text(names[1])} {verdict} the {_text(names[0])}</h1>"
        f'<p class="note">Greedy pass@1 on {comparison.problems:,} held-out problems: '
        f"{comparison.fixed:,} fixed, {comparison.broken:,} broken.</p>"
        f'<div class="cards">{boxes}</div>'
    )


def _facts(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    items = "".join(
        f"<div><dt>{_text(label)}</dt><dd>{_text(value)}</dd></div>"
        for label, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _metric_table(comparison: Comparison, names: tuple[str, str]) -> str:
    """Both models' metrics with intervals, and the paired gains."""
    c = comparison
    models = (c.before, c.after)
    rates = (
        ("pass@1, greedy", [m.pass_at_1 for m in models], c.gain),
        (f"pass@{c.k}, sampled", [m.pass_at_k for m in models], c.pass_at_k_gain),
        (f"majority of {c.samples}", [m.majority for m in models], c.majority_gain),
        ("format kept", [m.format_rate for m in models], None),
    )
    lines = [
        _line(label, [f"{_percent(i.mean)} % <small>{_ends(i)}</small>" for i in pair],
              f"{_points(gain.mean)} <small>{_gain_ends(gain)}</small>" if gain else "")
        for label, pair, gain in rates
    ]  # fmt: skip
    lines += [
        _line("tokens a response", [_lengths(m) for m in models], ""),
        _line("tokens a greedy response", [f"{m.greedy_length.mean:.1f}" for m in models], ""),
    ]
    head = "".join(f'<th class="number">{_text(title)}</th>' for title in (*names, "gain, points"))
    return (
        '<h2>Metrics</h2><div class="scroll"><table class="metrics">'
        f"<thead><tr><th>metric</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="note">Brackets: {100 * c.confidence:g} % intervals. Gains are differences on '
        f"the same problems, with a paired bootstrap of {c.bootstrap_samples:,} resamples, seed "
        f"{c.seed}. pass@k is the unbiased estimate from {c.samples} samples a problem.</p>"
    )


def _line(label: str, cells: Sequence[str], gain: str) -> str:
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in (*cells, gain))
    return f"<tr><td>{_text(label)}</td>{numbers}</tr>"


def _lengths(model: ModelSummary) -> str:
    lengths = model.response_length
    return f"{lengths.mean:.1f} <small>median {lengths.median:.0f}, p95 {lengths.p95:.0f}</small>"


def _plots(
    comparison: Comparison, before: pd.DataFrame, after: pd.DataFrame, names: tuple[str, str]
) -> str:
    bars = plots.metric_bars(comparison, names)
    lengths = plots.length_histogram(
        before["response_length"].to_numpy(), after["response_length"].to_numpy(), names
    )
    return (
        '<h2>Accuracy and length</h2><div class="plots">'
        f"<figure><h3>Problems solved</h3>{bars}</figure>"
        f"<figure><h3>Response length</h3>{lengths}</figure></div>"
    )


def _curves(curves: Mapping[str, Sequence[float]]) -> str:
    if not curves:
        return ""
    return f"<h2>Training</h2><figure>{plots.training_curves(curves)}</figure>"


def _examples(
    comparison: Comparison,
    before: pd.DataFrame,
    after: pd.DataFrame,
    names: tuple[str, str],
    examples: int,
) -> str:
    """Problems fixed, broken and still wrong, some of each."""
    was, now = before["greedy_correct"].to_numpy(), after["greedy_correct"].to_numpy()
    kinds = (
        ("Fixed", "wrong before, right now", ~was & now),
        ("Broken", "right before, wrong now", was & ~now),
        ("Still wrong", "wrong before and now", ~was & ~now),
    )
    generator = np.random.default_rng(comparison.seed)
    lines = []
    for title, meaning, mask in kinds:
        found = np.flatnonzero(mask)
        shown = np.sort(generator.permutation(found)[:examples])
        count = f"{found.size:,} of {comparison.problems:,}"
        lines.append(
            f'<tr class="group"><td colspan="4">{title}: {count} problems, {meaning}</td></tr>'
        )
        lines += [_example(before.iloc[row], after.iloc[row]) for row in shown]
    head = "".join(f"<th>{_text(title)}</th>" for title in ("problem", *names, "right answer"))
    return (
        '<h2>Sample completions</h2><div class="scroll"><table class="examples">'
        '<colgroup><col class="text"><col class="text"><col class="text"><col></colgroup>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _example(before: pd.Series, after: pd.Series) -> str:
    answers = "".join(
        f"<td><pre>{_text(row['greedy_completion'])}</pre>{_answer(row)}</td>"
        for row in (before, after)
    )
    return (
        f"<tr><td><pre>{_text(before['prompt'])}</pre></td>{answers}"
        f"<td><pre>{_text(before['ground_truth'])}</pre></td></tr>"
    )


def _answer(row: pd.Series) -> str:
    answer = row["greedy_answer"]
    shown = "no answer" if pd.isna(answer) else _text(answer)
    return f'<span class="{"right" if row["greedy_correct"] else "wrong"}">{shown}</span>'


def _title(model: str) -> str:
    return _MODEL_TITLES.get(model, model)


def _text(value: object) -> str:
    """Escape for HTML; what UTF-8 or HTML can't carry (lone surrogates, NUL) becomes �."""
    text = str(value)
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT] + " […]"
    return html.escape(_UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}")


def _ends(interval: Interval) -> str:
    return f"[{_percent(interval.low)}, {_percent(interval.high)}]"


def _gain_ends(interval: Interval) -> str:
    return f"[{_points(interval.low)}, {_points(interval.high)}]"
