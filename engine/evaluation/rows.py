"""The table of an evaluation: one row a problem and model, built from plain completions.

Also the check that two tables can be compared: same problems, same order, same text. Decoding
and scoring come in as lists and callables; statistics over the table live in `summary`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd

from engine.errors import DataError
from engine.evaluation.metrics import format_rate, majority_vote

ModelName = Literal["warm_start", "rl", "champion"]

COLUMNS: dict[str, str] = {
    "index": "position of the problem in its test set",
    "data_source": "where the problem is from, e.g. 'gsm8k'",
    "prompt": "the text that the model was given",
    "ground_truth": "the right answer",
    "model": "warm_start, rl or champion",
    "greedy_completion": "text decoded at temperature 0",
    "greedy_answer": "answer read from it, or None",
    "greedy_correct": "whether that answer is right",
    "sample_answers": "answers of the sampled completions, None where there is none",
    "samples_correct": "sampled completions with the right answer",
    "samples": "sampled completions",
    "majority_answer": "most frequent answer of the samples, or None",
    "majority_correct": "whether that answer is right",
    "response_length": "mean tokens of the samples",
    "greedy_length": "tokens of the greedy completion",
    "format_rate": "share of the samples that keep the answer format",
}

_IDENTITY = ["index", "data_source", "prompt", "ground_truth"]  # what makes a problem the same


@dataclass(frozen=True, slots=True)
class Problems:
    """What both models were asked; N entries in each field."""

    index: Sequence[int]  # position in the test set, e.g. [0, 1]
    data_source: Sequence[str]  # e.g. ["arithmetic", "arithmetic"]
    prompt: Sequence[str]  # e.g. ["Tom has 3 apples …", …]
    ground_truth: Sequence[str]  # e.g. ["7", "12"]


@dataclass(frozen=True, slots=True)
class Completions:
    """What one model answered to the N problems, in their order."""

    greedy: Sequence[str]  # [N] texts
    greedy_lengths: Sequence[int]  # [N] tokens
    samples: Sequence[Sequence[str]]  # [N][n] texts, n ≥ 1
    sample_lengths: Sequence[Sequence[int]]  # [N][n] tokens


def build_rows(
    model: ModelName,
    problems: Problems,
    completions: Completions,
    extract: Callable[[str], str | None],
    correct: Callable[[str, str], bool],
    well_formed: Callable[[str], bool] | None = None,
) -> pd.DataFrame:
    """Score the completions of one model; returns N rows with the columns of `COLUMNS`.

    extract: completion → its answer, or None where there is none.
    correct: (answer, ground truth) → right or not; never called without an answer.
    well_formed: completion → whether it keeps the format; by default, whether it has an answer.
    Raises DataError when the lists don't fit together.
    """
    if model not in get_args(ModelName):
        raise DataError(f"model={model!r} is unknown; choose one of {get_args(ModelName)}")
    _check_sizes(problems, completions)

    def is_right(answer: str | None, truth: str) -> bool:
        return answer is not None and bool(correct(answer, truth))

    rows: list[dict[str, Any]] = []
    for i, truth in enumerate(problems.ground_truth):
        greedy = _storable(completions.greedy[i])
        samples = [_storable(text) for text in completions.samples[i]]
        greedy_answer = extract(greedy)
        answers = [extract(text) for text in samples]
        majority = majority_vote(answers)
        if well_formed is None:
            kept = [answer is not None for answer in answers]
        else:
            kept = [well_formed(text) for text in samples]
        rows.append(
            {
                "index": int(problems.index[i]),
                "data_source": problems.data_source[i],
                "prompt": problems.prompt[i],
                "ground_truth": truth,
                "model": model,
                "greedy_completion": greedy,
                "greedy_answer": greedy_answer,
                "greedy_correct": is_right(greedy_answer, truth),
                "sample_answers": answers,
                "samples_correct": sum(is_right(answer, truth) for answer in answers),
                "samples": len(answers),
                "majority_answer": majority,
                "majority_correct": is_right(majority, truth),
                "response_length": sum(completions.sample_lengths[i]) / len(answers),
                "greedy_length": int(completions.greedy_lengths[i]),
                "format_rate": format_rate(kept),
            }
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    # A column of None alone would otherwise be typed by chance.
    return frame.astype({"greedy_answer": "str", "majority_answer": "str"})


def prompt_digest(rows: pd.DataFrame) -> str:
    """SHA-256 (hex) over the problems of one model's rows: their order, text and ground truth."""
    lines = rows[_IDENTITY].itertuples(index=False, name=None)
    canonical = json.dumps([[str(field) for field in line] for line in lines])
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_paired(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """Return the prompt digest that both tables share.

    Raises DataError, naming the first row that differs, when the tables hold other problems,
    another order or number of them, or more than one model each.
    """
    for side, rows in (("before", before), ("after", after)):
        missing = [column for column in COLUMNS if column not in rows.columns]
        if missing:
            raise DataError(f"evaluation rows ({side}) lack the columns {missing}; evaluate again")
        if rows["model"].nunique() != 1:
            names = sorted(map(str, rows["model"].unique()))
            raise DataError(
                f"evaluation rows ({side}) must hold one model, got {names}; select one first"
            )
    if len(before) != len(after):
        raise DataError(
            f"the models were asked {len(before)} and {len(after)} problems; "
            "evaluate both on the same test set"
        )
    digest = prompt_digest(before)
    if digest != prompt_digest(after):
        row, column = _first_difference(before, after)
        raise DataError(
            f"evaluation rows differ in {column!r} at row {row}: {before[column].iloc[row]!r} "
            f"before, {after[column].iloc[row]!r} after; evaluate both models on the same "
            "problems in the same order"
        )
    return digest


def _storable(text: str) -> str:
    """Replace lone surrogates, which a model can emit and Parquet can't hold, by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _first_difference(before: pd.DataFrame, after: pd.DataFrame) -> tuple[int, str]:
    """Return row and column of the first difference between two tables of equal length."""
    for row in range(len(before)):
        for column in _IDENTITY:
            if str(before[column].iloc[row]) != str(after[column].iloc[row]):
                return row, column
    raise AssertionError("digests differ, rows do not")


def _check_sizes(problems: Problems, completions: Completions) -> None:
    """Hold every list to N entries, and every problem's samples to their lengths."""
    sizes = {name: len(getattr(problems, name)) for name in Problems.__slots__}
    sizes |= {name: len(getattr(completions, name)) for name in Completions.__slots__}
    if len(set(sizes.values())) > 1:
        raise DataError(f"an evaluation needs one entry a problem in every list, got {sizes}")
    if len(problems.index) == 0:
        raise DataError("an evaluation needs at least one problem; the test split is empty")
    for i, (texts, lengths) in enumerate(
        zip(completions.samples, completions.sample_lengths, strict=True)
    ):
        if not texts or len(texts) != len(lengths):
            raise DataError(
                f"problem {i} has {len(texts)} samples and {len(lengths)} lengths; "
                "give one length a sample, and at least one sample"
            )
