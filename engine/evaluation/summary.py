"""The comparison of two tables of evaluation rows: in total, by source and level, and by set.

The table of an evaluation holds the problems of all evaluation sets; `TEST` is the run's own split.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError

from engine.data.rows import EPISODE_COLUMNS
from engine.data.sources import evaluation_files
from engine.errors import DataError, LineageError, first_line
from engine.evaluation import metrics
from engine.evaluation.metrics import Interval, Kind, LengthSummary
from engine.evaluation.results import check_paired
from engine.storage.filesystem import read_file


@dataclass(frozen=True, slots=True)
class Statistics:
    """How the numbers of a comparison are made."""

    k: int  # of pass@k
    confidence: float  # of every interval, e.g. 0.95
    seed: int  # of the samples


_MEASURED: tuple[tuple[str, str, Kind], ...] = (
    ("turns, greedy", "greedy_turns", "number"),
    ("return, greedy", "greedy_return", "number"),
    ("called a tool, greedy", "greedy_called", "share"),
    ("malformed calls, greedy", "greedy_malformed", "number"),
    ("turns, sampled", "sample_turns", "number"),
    ("return, sampled", "sample_return", "number"),
    ("called a tool, sampled", "sample_called", "share"),
    ("malformed calls, sampled", "sample_malformed", "number"),
)


@dataclass(frozen=True, slots=True)
class EpisodeMeasure:
    """A mean over the episodes of two models, with intervals; its change is paired."""

    name: str  # e.g. "turns, greedy"
    kind: Kind
    before: Interval
    after: Interval
    change: Interval

    def line(self) -> str:
        """E.g. `turns, greedy 6.10 → 4.20 (-1.90 [-2.10, -1.70])`."""
        before, after = self.before.mean, self.after.mean
        if self.kind == "share":
            return f"{self.name} {before:.1%} → {after:.1%} ({_signed(self.change, 100, 1)})"
        return f"{self.name} {before:.2f} → {after:.2f} ({_signed(self.change, 1, 2)})"


def _signed(change: Interval, scale: float, digits: int) -> str:
    mean, low, high = (f"{scale * value + 0.0:+.{digits}f}" for value in change)
    return f"{mean} [{low}, {high}]"


def compare_episodes(
    before: pd.DataFrame, after: pd.DataFrame, statistics: Statistics
) -> list[EpisodeMeasure]:
    """Compare two models' rows of the same problems; empty where these are no episodes.

    Measures of tools are left out where neither model called any.
    """
    if any(name not in table for table in (before, after) for name in EPISODE_COLUMNS):
        return []
    tables = [rows.assign(greedy_called=rows["greedy_calls"] > 0) for rows in (before, after)]
    tools = [name for _, name, _ in _MEASURED if "called" in name or "malformed" in name]
    no_tools = not any(table[tools].to_numpy(float).any() for table in tables)
    measures = []
    confidence = statistics.confidence
    for label, name, kind in (m for m in _MEASURED if m[1] not in tools or not no_tools):
        old, new = (table[name].to_numpy(float) for table in tables)
        first, second = (metrics.mean_interval(v, confidence, kind) for v in (old, new))
        change = metrics.paired_interval(old, new, confidence, kind)
        measures.append(EpisodeMeasure(label, kind, first, second, change))
    return measures


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model's metrics; rates are fractions of the problems."""

    model: str  # "warm_start", "rl" or "champion"
    pass_at_1: Interval  # greedy decoding
    mean_at_k: Interval  # samples that are right
    pass_at_k: Interval  # unbiased estimate from the samples
    majority: Interval  # majority vote over the samples
    format_rate: Interval  # samples that keep the answer format
    truncated: Interval  # greedy completions at the limit of tokens
    response_length: LengthSummary  # a problem's mean tokens over its samples
    greedy_length: LengthSummary  # tokens of greedy completions
    greedy_score: float  # mean score of greedy completions
    errors: int  # completions that could not be scored, and count as wrong


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """Two models on the same problems. Gains are `after − before` with paired intervals."""

    before: ModelSummary
    after: ModelSummary
    gain: Interval  # greedy pass@1: what promotion decides on
    mean_at_k_gain: Interval
    pass_at_k_gain: Interval
    majority_gain: Interval
    fixed: int  # problems wrong before and right after (greedy)
    broken: int  # problems right before and wrong after (greedy)
    problems: int  # N
    prompt_digest: str  # SHA-256 of what both were asked
    k: int  # of pass@k
    samples: int  # fewest sampled completions of a problem
    confidence: float  # of every interval, e.g. 0.95
    seed: int  # of the samples
    # Turns, returns and calls, where completions are episodes.
    episodes: list[EpisodeMeasure] = field(default_factory=list)

    def to_json(self) -> str:
        """Strict JSON (no NaN), the same text for the same comparison."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False)


def summarise(
    before: pd.DataFrame, after: pd.DataFrame, statistics: Statistics
) -> EvaluationComparison:
    """Compare two models' rows (see `EVALUATION_ROWS` in `engine.data.rows`) problem by problem.

    Raises DataError when the rows are not of the same problems in the same order, or when a problem
    has fewer than k samples.
    """
    digest = check_paired(before, after)
    if (before["samples"].to_numpy() != after["samples"].to_numpy()).any():
        raise DataError(
            "the models have different numbers of samples a problem, so pass@k and majority "
            "votes can't be compared; evaluate both with the same evaluate.samples"
        )
    old, new = _flags(before, "greedy_correct"), _flags(after, "greedy_correct")
    votes = (_flags(rows, "majority_correct") for rows in (before, after))
    k = statistics.k

    def gain(first: np.ndarray, second: np.ndarray) -> Interval:
        return metrics.paired_interval(first, second, statistics.confidence)

    return EvaluationComparison(
        before=model_summary(before, statistics),
        after=model_summary(after, statistics),
        gain=gain(old, new),
        mean_at_k_gain=gain(_mean_at_k(before), _mean_at_k(after)),
        pass_at_k_gain=gain(_pass_at_k(before, k), _pass_at_k(after, k)),
        majority_gain=gain(*votes),
        fixed=int(np.sum(~old & new)),
        broken=int(np.sum(old & ~new)),
        problems=len(before),
        prompt_digest=digest,
        samples=int(before["samples"].min()),
        episodes=compare_episodes(before, after, statistics),
        **asdict(statistics),
    )


def model_summary(rows: pd.DataFrame, statistics: Statistics) -> ModelSummary:
    """One model's metrics on the problems of `rows`, at least one."""

    def mean(values: np.ndarray) -> Interval:
        return metrics.mean_interval(values, statistics.confidence)

    return ModelSummary(
        model=str(rows["model"].iloc[0]),
        pass_at_1=mean(_flags(rows, "greedy_correct")),
        mean_at_k=mean(_mean_at_k(rows)),
        pass_at_k=mean(_pass_at_k(rows, statistics.k)),
        majority=mean(_flags(rows, "majority_correct")),
        format_rate=mean(rows["format_rate"].to_numpy()),
        truncated=mean(_flags(rows, "greedy_truncated")),
        response_length=metrics.length_summary(rows["response_length"].to_numpy()),
        greedy_length=metrics.length_summary(rows["greedy_length"].to_numpy()),
        greedy_score=float(rows["greedy_score"].mean()),
        errors=int(rows["errors"].sum()),
    )


def _mean_at_k(rows: pd.DataFrame) -> np.ndarray:
    return (rows["samples_correct"] / rows["samples"]).to_numpy(float)


def _pass_at_k(rows: pd.DataFrame, k: int) -> np.ndarray:
    return metrics.pass_at_k(rows["samples"].to_numpy(), rows["samples_correct"].to_numpy(), k)


def _flags(rows: pd.DataFrame, column: str) -> np.ndarray:
    """A column of booleans `[N]`; DataError for a hole in it."""
    if rows[column].dtype != bool:
        raise DataError(
            f"evaluation column {column!r} must hold booleans, got {rows[column].dtype}; "
            "evaluate again"
        )
    return rows[column].to_numpy()


@dataclass(frozen=True, slots=True)
class Part:
    """Two models on the problems of one source, or of one level of it."""

    source: str
    level: str  # empty: all of the source
    problems: int
    before: ModelSummary
    after: ModelSummary
    gain: Interval  # of greedy pass@1, paired

    def line(self) -> str:
        """E.g. `gsm8k: pass@1 40.0% → 55.0% (+15.0 [+3.0, +27.0]), …`."""
        name = f"{self.source}, {self.level}" if self.level else self.source
        return f"{name}: {described(self)}"


def described(models: EvaluationComparison | Part) -> str:
    """Both models' rates: `pass@1 40.0% → 55.0% (+15.0 [+3.0, +27.0]), …; 60 problems`."""
    before, after = models.before, models.after
    shown = {
        "pass@1": (before.pass_at_1, after.pass_at_1),
        "mean@k": (before.mean_at_k, after.mean_at_k),
        "pass@k": (before.pass_at_k, after.pass_at_k),
        "maj@k": (before.majority, after.majority),
        "truncated": (before.truncated, after.truncated),
    }
    rates = [f"{label} {old.mean:.1%} → {new.mean:.1%}" for label, (old, new) in shown.items()]
    rates[0] += f" ({_signed(models.gain, 100, 1)})"
    errors = before.errors + after.errors
    failed = f", {errors} not scored" if errors else ""
    return f"{', '.join(rates)}; {models.problems} problems{failed}"


def breakdown(before: pd.DataFrame, after: pd.DataFrame, statistics: Statistics) -> list[Part]:
    """The parts of two models' rows: each source, then its levels, where it has several.

    Raises DataError where the rows are not of the same problems.
    """
    check_paired(before, after)
    before, after = before.reset_index(drop=True), after.reset_index(drop=True)

    def part(source: str, level: str, rows: pd.Series) -> Part:
        tables = (before[rows], after[rows])
        old, new = (table["greedy_correct"].to_numpy(float) for table in tables)
        gain = metrics.paired_interval(old, new, statistics.confidence)
        first, second = (model_summary(table, statistics) for table in tables)
        return Part(source, level, len(old), first, second, gain)

    parts = []
    for source in sorted(set(before["data_source"])):
        here = before["data_source"] == source
        parts.append(part(str(source), "", here))
        levels = sorted(set(before["level"][here]) - {""})
        for level in levels if len(levels) > 1 else ():
            parts.append(part(str(source), str(level), here & (before["level"] == level)))
    return parts


TEST, ALL = "test", "all"
FILE = "sets.json"


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """Two models on one evaluation set."""

    name: str  # "test", or a name of data.evaluation_sets
    comparison: EvaluationComparison
    parts: list[Part]  # by source and level
    known: int  # problems that are known from training

    def lines(self) -> list[str]:
        """A line with the scores and the contamination, then a line a part."""
        lines = [f"{described(self.comparison)}; known from training: {self.contamination}"]
        if episodes := self.comparison.episodes:
            lines.append("; ".join(measure.line() for measure in episodes))
        lines += [part.line() for part in self.proper_parts]
        return [f"{self.name}: {line}" for line in lines]

    @property
    def proper_parts(self) -> list[Part]:
        return [part for part in self.parts if part.problems < self.comparison.problems]

    @property
    def contamination(self) -> str:
        """How many prompts are known from training, e.g. `3 of 512 prompts (0.6%)`."""
        known, problems = self.known, self.comparison.problems
        return f"{known} of {problems} prompts ({known / problems:.1%})"


def read_problems(dataset: Path) -> dict[str, pd.DataFrame]:
    """The RL rows of every evaluation set in a dataset's folder, `test` first."""
    return {name: pd.read_parquet(path) for name, path in evaluation_files(dataset).items()}


def compare_sets(
    before: pd.DataFrame, after: pd.DataFrame, known: Mapping[str, int], statistics: Statistics
) -> list[EvaluatedSet]:
    """Compare two models' rows set by set, in the order of `known`: problems known from training.

    Raises DataError as `summarise` does, with the set's name.
    """
    compared = []
    for name, count in known.items():
        tables = rows_of_set(before, name), rows_of_set(after, name)
        try:
            comparison = summarise(*tables, statistics)
        except DataError as error:
            raise error.with_message(f"evaluation set {name}: {error}") from error
        compared.append(EvaluatedSet(name, comparison, breakdown(*tables, statistics), count))
    return compared


def set_names(rows: pd.DataFrame) -> list[str]:
    """The evaluation sets of a table, in its order."""
    return [str(name) for name in rows["dataset"].unique()]


def rows_of_set(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one evaluation set; DataError where there are none."""
    names = set_names(rows)
    if name not in names:
        raise DataError(
            f"the evaluation has no set {name!r}, but {', '.join(names)}; name one of them, or "
            "evaluate again with it in data.evaluation_sets"
        )
    return rows[rows["dataset"] == name].reset_index(drop=True)


def write_sets(folder: Path, sets: list[EvaluatedSet]) -> None:
    """Write evaluation sets into an evaluation's folder."""
    text = json.dumps([asdict(evaluated) for evaluated in sets], indent=2, allow_nan=False)
    (folder / FILE).write_text(text)


def read_sets(folder: str | Path) -> list[EvaluatedSet]:
    """Read what `write_sets` wrote, in a folder or at an address; LineageError if that fails."""
    where = f"{folder}/{FILE}"
    try:
        return TypeAdapter(list[EvaluatedSet]).validate_json(read_file(where, LineageError))
    except (OSError, ValidationError) as error:
        first = first_line(error)
        raise LineageError(f"{where} can't be read ({first}); evaluate the models again") from error
