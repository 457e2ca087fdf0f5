"""Evaluation sets: two models compared on each of several, with what is known from training.

The table of an evaluation holds the problems of all sets; `TEST` is the run's own split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from pydantic import TypeAdapter, ValidationError

from engine.data.evaluation_sets import evaluation_files
from engine.errors import DataError, LineageError
from engine.evaluation.breakdown import Part, breakdown, described
from engine.evaluation.summary import EvaluationComparison, summarise

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
        """The scores with the contamination, then a line a part."""
        found = self.comparison
        rates = described(found.before, found.after, found.gain, found.problems)
        whole = f"{self.name}: {rates}; {self.contamination}"
        lines = [whole]
        if found.episodes:
            lines.append(f"{self.name}: {'; '.join(one.line() for one in found.episodes)}")
        return [*lines, *(f"{self.name}: {part.line()}" for part in self.proper_parts)]

    @property
    def proper_parts(self) -> list[Part]:
        """The parts that aren't all of the set."""
        return [part for part in self.parts if part.problems < self.comparison.problems]

    @property
    def contamination(self) -> str:
        """E.g. `3 of 512 prompts known from training (0.6%)`."""
        problems = self.comparison.problems
        share = self.known / problems
        return f"{self.known} of {problems} prompts known from training ({share:.1%})"


def read_problems(dataset: Path) -> dict[str, pd.DataFrame]:
    """The RL rows of every evaluation set in a dataset's folder, `test` first."""
    return {name: pd.read_parquet(path) for name, path in evaluation_files(dataset).items()}


def compare_sets(
    before: pd.DataFrame,
    after: pd.DataFrame,
    known: Mapping[str, int],
    k: int,
    confidence: float,
    bootstrap_samples: int,
    seed: int,
) -> list[EvaluatedSet]:
    """Compare two models' rows set by set, in the order of `known`: problems known from training.

    Raises DataError as `summarise` does, with the set's name.
    """
    compared = []
    for name, count in known.items():
        one, two = rows_of_set(before, name), rows_of_set(after, name)
        settings = (k, confidence, bootstrap_samples, seed)
        try:
            comparison = summarise(one, two, *settings)
        except DataError as error:
            raise DataError(f"evaluation set {name}: {error}") from error
        compared.append(EvaluatedSet(name, comparison, breakdown(one, two, *settings), count))
    return compared


def set_names(rows: pd.DataFrame) -> list[str]:
    """The evaluation sets of a table, in its order; DataError for one that doesn't name them."""
    if "dataset" not in rows:
        raise DataError(
            "the evaluation was made by code that knew no evaluation sets; evaluate again"
        )
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
    """Write them into an evaluation's folder."""
    text = json.dumps([asdict(one) for one in sets], indent=2, allow_nan=False)
    (folder / FILE).write_text(text)


def read_sets(folder: Path) -> list[EvaluatedSet]:
    """Read what `write_sets` wrote; LineageError where it can't be read."""
    try:
        return TypeAdapter(list[EvaluatedSet]).validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise LineageError(
            f"{folder / FILE} can't be read ({first}); evaluate the models again"
        ) from error
