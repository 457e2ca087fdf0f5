"""The report's pictures as inline SVG text: metric bars, length histogram, training curves.

They are drawn without pyplot, whose state is the process's. Letters are outlines: no font is
looked up where a page is read.
"""

import io
import math
import re
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike

from engine.evaluation.policy_steps import Overoptimisation, smoothed
from engine.evaluation.summary import EvaluationComparison

BEFORE_COLOUR = "#a3adbd"
AFTER_COLOUR = "#2f5fd0"
_TEXT = "#3b4352"
_FAINT = "#e6e9ef"
LINE_COLOURS = ("#2f5fd0", "#c2571a", "#2b8a5f", "#8a4fbf", "#b0306a", "#5b6472")
_LEGEND: dict[str, Any] = {
    "loc": "upper left", "bbox_to_anchor": (0, 1.13), "ncols": 2, "frameon": False,
    "fontsize": 8.5, "labelcolor": _TEXT,
}  # fmt: skip
_PATCHES: dict[str, Any] = {"handlelength": 1.1, "handleheight": 0.9, "columnspacing": 1.4}
FEW = 10  # points of a curve that are not smoothed
_WIDE, _NARROW = (4.6, 3.0), (3.6, 2.2)  # inches; a phone shows the letters of either at 9 px


def metric_bars(comparison: EvaluationComparison, names: tuple[str, str]) -> str:
    """Draw pass@1, pass@k and majority vote of both models as bars with their intervals."""
    figure = Figure(figsize=_WIDE, facecolor="none")
    axes = figure.add_subplot()
    sides = (comparison.before, comparison.after)
    labels = ["pass@1\ngreedy", f"pass@{comparison.k}\nsampled", "majority\nvote"]
    ends = []
    for side, (model, colour) in enumerate(zip(sides, (BEFORE_COLOUR, AFTER_COLOUR), strict=True)):
        intervals = (model.pass_at_1, model.pass_at_k, model.majority)
        positions = np.arange(len(labels)) + (side - 0.5) * 0.38
        means = [interval.mean for interval in intervals]
        errors = [(max(0.0, i.mean - i.low), max(0.0, i.high - i.mean)) for i in intervals]
        axes.bar(positions, means, width=0.35, color=colour, label=names[side], zorder=2)
        axes.errorbar(
            positions, means, yerr=np.transpose(errors), fmt="none", ecolor=_TEXT, elinewidth=1.1,
            capsize=3, capthick=1.1, zorder=3,
        )  # fmt: skip
        for x, interval in zip(positions, intervals, strict=True):
            axes.annotate(
                f"{100 * interval.mean:.1f}", (x, interval.high), xytext=(0, 4),
                textcoords="offset points", ha="center", fontsize=8, color=_TEXT,
            )  # fmt: skip
        ends += [interval.high for interval in intervals]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlim=(-0.6, len(labels) - 0.4), ylim=(0, max(0.05, 1.15 * max(ends))))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    _plain(axes)
    axes.legend(**_LEGEND, **_PATCHES)
    return _to_svg(figure, "bars")


def length_histogram(before: ArrayLike, after: ArrayLike, names: tuple[str, str]) -> str:
    """Draw the response lengths of both models (`[N]` tokens a problem) on common bins."""
    first, second = (np.asarray(v, dtype=np.float64) for v in (before, after))
    figure = Figure(figsize=_WIDE, facecolor="none")
    axes = figure.add_subplot()
    low, high = math.floor(min(first.min(), second.min())), max(first.max(), second.max())
    width = max(1, math.ceil((high - low + 1) / 30))  # whole tokens, about 30 bins
    bins: list[float] = np.arange(low, high + 2 * width, width).tolist()
    sides = ((first, BEFORE_COLOUR, names[0]), (second, AFTER_COLOUR, names[1]))
    for values, colour, name in sides:
        axes.hist(values, bins, histtype="stepfilled", color=colour, alpha=0.45, label=name)
        axes.hist(values, bins, histtype="step", color=colour, linewidth=1.4)
        axes.axvline(float(values.mean()), color=colour, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="tokens a response (a problem's mean; dashed: mean of all)", ylabel="problems")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(top=1.18 * axes.get_ylim()[1])  # room for the legend
    _plain(axes)
    axes.legend(**_LEGEND, **_PATCHES)
    return _to_svg(figure, "lengths")


def curves(metrics: Mapping[str, Mapping[str, Mapping[int, float]]]) -> dict[str, str]:
    """Draw one picture a metric, by its name: the values by step of each run, over each other.

    Non-finite values leave a gap; of many values the bold line is the moving mean. A run whose
    values equal an earlier run's is dashed, so that both colours are seen.
    """
    pictures = {}
    for number, (name, runs) in enumerate(metrics.items()):
        figure = Figure(figsize=_NARROW, facecolor="none")
        axes = figure.add_subplot()
        drawn: list[Mapping[int, float]] = []
        for values, colour in zip(runs.values(), cycle(LINE_COLOURS)):
            steps = list(values)
            points = np.nan_to_num([*values.values()], nan=np.nan, posinf=np.nan, neginf=np.nan)
            axes.plot(steps, points, color=colour, linewidth=0.9, alpha=0.35)
            bold = smoothed(points) if len(points) > FEW else points
            alone = "o" if len(points) == 1 else None  # a line of one point is not seen
            dashes = "--" if values in drawn else "-"
            axes.plot(steps, bold, dashes, color=colour, linewidth=1.8, marker=alone)
            drawn.append(values)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("step")
        _plain(axes)
        pictures[name] = _to_svg(figure, f"curve{number}")
    return pictures


def overoptimisation(steps: Overoptimisation) -> str:
    """Draw the reward model's score and the true reward over the KL, a point a step."""
    figure = Figure(figsize=_WIDE, facecolor="none")
    left = figure.add_subplot()
    right = left.twinx()
    sides = (
        (left, steps.model_reward, LINE_COLOURS[1], "reward model (left)"),
        (right, steps.true_reward, LINE_COLOURS[0], "true reward (right)"),
    )
    for axes, values, colour, label in sides:
        axes.scatter(steps.kl, values, s=6, color=colour, alpha=0.3, linewidths=0)
        axes.plot(smoothed(steps.kl), smoothed(values), color=colour, linewidth=1.8, label=label)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        _plain(axes)
    right.grid(visible=False)
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    left.set_xlabel("KL from the start, nats a completion")
    left.legend(handles=[axes.get_lines()[0] for axes, *_ in sides], **_LEGEND)
    return _to_svg(figure, "overoptimisation")


def _plain(axes: Axes) -> None:
    """Give axes the page's look, whatever style the process has set."""
    axes.set(facecolor="none", axisbelow=True)
    axes.grid(visible=False)
    axes.grid(axis="y", color=_FAINT, linewidth=0.9)
    axes.tick_params(length=0, labelsize=9, labelcolor=_TEXT)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color="#c3c9d4")
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=9, color=_TEXT)


def _to_svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element whose ids are the same each time and clash with no other."""
    figure.set_layout_engine("tight")
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    old_ids = dict.fromkeys(re.findall(r'\bid="([^"]+)"', svg))
    ids = {old: f"{name}-{number}" for number, old in enumerate(old_ids)}

    def renamed(match: re.Match[str]) -> str:
        return match[1] + ids.get(match[2], match[2]) + match[3]

    return re.sub(r'(\bid="|href="#|url\(#)([^")]+)("|\))', renamed, svg)
