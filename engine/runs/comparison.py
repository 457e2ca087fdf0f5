"""Two or more runs beside each other: settings, metrics, and what changed against the first."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from engine import html_templates
from engine.console import points
from engine.errors import DataError
from engine.evaluation import plots
from engine.evaluation.comparability import incomparable
from engine.evaluation.metrics import Interval, mean_interval, paired_interval
from engine.lineage.compare import ABSENT, cut_digests
from engine.runs.sources import Curve, RecordedRun
from engine.samples.sample_files import VALIDATION

SHOWN = (
    "reward/mean", "validation/reward", "validation/correct", "actor/kl", "actor/entropy",
    "response/length_mean", "actor/grad_norm", "*/loss",
)  # fmt: skip
CONFIDENCE = 0.95
_TEMPLATES = html_templates.environment(__package__)


@dataclass(frozen=True)
class PairedGain:
    """The answers of one run against those of the first, on the problems that both have."""

    before: Interval  # share of right answers of the first run
    after: Interval
    gain: Interval  # after − before, paired
    problems: int
    test: str  # "evaluation" or "validation"
    fixed: list[dict[Hashable, str]]  # what this run alone solves: the problem, both completions
    broken: list[dict[Hashable, str]]  # what the first alone solves
    note: str  # what the two don't share; empty: nothing

    def sentence(self) -> str:
        """E.g. `40.0% → 55.0%, +15.0 percentage points [+3.0, +27.0] on 60 problems of the …`."""
        rates = f"{self.before.mean:.1%} → {self.after.mean:.1%}, {points(self.gain)}"
        counts = f"{len(self.fixed)} fixed, {len(self.broken)} broken"
        note = f"; not alike: {self.note}" if self.note else ""
        return f"{rates} on {self.problems} problems of the {self.test}; {counts}{note}"


@dataclass(frozen=True)
class RunComparison:
    """Runs in order, by their names; the others are compared with the first."""

    runs: dict[str, str]  # where each was found
    settings: dict[str, list[str]]  # those that differ: a text a run
    curves: dict[str, list[Curve]]  # by metric: values by step, of each run
    pairs: dict[str, PairedGain | str]  # of each run but the first; or why there is none

    def as_page(self) -> str:
        """Return an HTML page that needs nothing else, in the report's style."""
        lines = {k: dict(zip(self.runs, v, strict=True)) for k, v in self.curves.items()}
        return _TEMPLATES.get_template("runs.html.j2").render(
            comparison=self, css=html_templates.stylesheet(), colours=plots.LINE_COLOURS,
            curves=plots.curves(lines), first=next(iter(self.runs)),
        )  # fmt: skip


def compare(runs: Sequence[RecordedRun], patterns: Sequence[str] = SHOWN) -> RunComparison:
    """Compare runs with the first of them; those of one name get numbers.

    patterns: of the metrics to show, as a shell's. Raises DataError for patterns of one's own that
    match none.
    """
    seen = [run.name for run in runs]
    names = [f"{n} ({seen[:i].count(n) + 1})" if n in seen[:i] else n for i, n in enumerate(seen)]
    keys = sorted(set[str]().union(*(run.settings for run in runs)))
    sides = {key: [_setting(run, key) for run in runs] for key in keys}
    known = dict.fromkeys(name for run in runs for name in run.metrics)
    metrics = dict.fromkeys(n for pattern in patterns for n in known if fnmatch(n, pattern))
    if not metrics and patterns is not SHOWN:
        raise DataError(
            f"no run has a metric {' or '.join(patterns)}; they have {', '.join(known) or 'none'}"
        )
    return RunComparison(
        {name: run.place for name, run in zip(names, runs, strict=True)},
        {key: side for key, side in sides.items() if len({*side} - {ABSENT}) > 1},
        {metric: [run.metrics.get(metric, {}) for run in runs] for metric in metrics},
        {name: _pair(runs[0], run) for name, run in list(zip(names, runs, strict=True))[1:]},
    )


def _setting(run: RecordedRun, name: str) -> str:
    """Return a setting with its digests cut; of one in a section that is empty there, `{}`."""
    sections = (name.rsplit(".", n)[0] for n in range(name.count(".") + 1))
    return cut_digests(next((run.settings[s] for s in sections if s in run.settings), ABSENT))


def _pair(first: RecordedRun, other: RecordedRun) -> PairedGain | str:
    """Compare the answers to the same problems; or say why that can't be done."""
    for run in (first, other):
        if not run.test:
            return f"{run.name} has neither an evaluation nor a sample of a validation"
    both = f"{first.name} has the {first.test}, {other.name} the {other.test}"
    (test, *_), (kind, *_) = first.test.split(), other.test.split()
    if test != kind:
        return f"{both}; evaluate both alike"
    rows = first.answers.join(other.answers, how="inner", lsuffix="_before", rsuffix="_after")
    if rows.empty:
        return f"{both}, which have no problem in common"
    notes = [both] if test == VALIDATION and first.test != other.test else []
    if first.evaluation and other.evaluation:
        notes += incomparable(first.evaluation, other.evaluation)
    if len(rows) < max(len(first.answers), len(other.answers)):
        notes.append(f"{len(first.answers)} and {len(other.answers)} problems")
    before, after = rows["correct_before"], rows["correct_after"]
    texts = rows.reset_index()[["prompt", "ground_truth", "completion_before", "completion_after"]]
    was, now = (before >= 0.5).to_numpy(), (after >= 0.5).to_numpy()
    fixed, broken = (texts[mask].to_dict("records") for mask in (~was & now, was & ~now))
    return PairedGain(
        mean_interval(before, CONFIDENCE), mean_interval(after, CONFIDENCE),
        paired_interval(before, after, CONFIDENCE), len(rows), test, fixed, broken,
        ", ".join(notes),
    )  # fmt: skip
