"""The table of an evaluation: one row a problem and model, built from completions with scores.

It also checks that two tables can be compared: same problems, same order, same text. Decoding and
scoring are in `scoring`; statistics over the table are in `summary`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import pandas as pd

from engine.errors import DataError
from engine.evaluation.metrics import format_rate, majority_vote

if TYPE_CHECKING:
    from engine.agents.episode import EpisodeSummary

ModelName = Literal["warm_start", "rl", "champion"]

COLUMNS: dict[str, str] = {
    "dataset": "the evaluation set: test, or a name of data.evaluation_sets",
    "index": "position of the problem in its set",
    "data_source": "where the problem is from, e.g. 'gsm8k'",
    "level": "how hard it is, e.g. 'Level 3'; empty where the data don't say",
    "prompt": "the text that the model was given",
    "ground_truth": "the right answer",
    "model": "warm_start, rl or champion",
    "greedy_completion": "text decoded at temperature 0",
    "greedy_answer": "answer read from it, or None",
    "greedy_correct": "whether the completion is right",
    "greedy_score": "its score",
    "greedy_truncated": "whether it hit the limit of tokens",
    "sample_answers": "answers of the sampled completions, None where there is none",
    "samples_correct": "sampled completions that are right",
    "samples": "sampled completions",
    "sample_score": "their mean score",
    "majority_answer": "most frequent answer of the samples, or None",
    "majority_correct": "whether that answer, or most frequent text where none is read, is right",
    "response_length": "mean tokens of the samples",
    "greedy_length": "tokens of the greedy completion",
    "truncated": "share of the samples that hit the limit of tokens",
    "format_rate": "share of the samples that keep the format; 1 where the scorer knows none",
    "errors": "completions that could not be scored, and count as wrong",
}

EPISODE_COLUMNS: dict[str, str] = {
    "greedy_turns": "turns of the policy in the greedy episode",
    "greedy_return": "what its environment gave",
    "greedy_calls": "tools that it called",
    "greedy_malformed": "calls in it that can't be read",
    "greedy_end": "how it ended: done, turns, tokens, seconds or failed",
    "sample_turns": "mean turns of the sampled episodes",
    "sample_return": "mean of what their environments gave",
    "sample_called": "share of them that called a tool",
    "sample_malformed": "mean calls that can't be read",
}
"""Columns besides `COLUMNS` where problems are episodes; a completion is then all turns' text."""

# The columns that identify a problem.
_IDENTITY = ["dataset", "index", "data_source", "prompt", "ground_truth"]


@dataclass(frozen=True, slots=True)
class Problems:
    """The problems that both models answer; N entries in each field."""

    dataset: Sequence[str]  # the evaluation set, e.g. ["test", "test"]
    index: Sequence[int]  # position in its set, e.g. [0, 1]
    data_source: Sequence[str]  # e.g. ["arithmetic", "arithmetic"]
    level: Sequence[str]  # e.g. ["Level 1", "Level 5"], or ["", ""]
    prompt: Sequence[str]  # e.g. ["Tom has 3 apples …", …]
    ground_truth: Sequence[str]  # e.g. ["7", "12"]

    def rows(self, part: slice) -> Problems:
        """Return the problems of some rows."""
        return Problems(**{name: getattr(self, name)[part] for name in Problems.__slots__})


@dataclass(frozen=True, slots=True)
class Judged:
    """A completion and what the scorer says of it."""

    text: str
    tokens: int
    truncated: bool  # at the limit of tokens
    correct: bool
    score: float  # weighted sum of the components
    answer: str | None  # read from the text; None: there is none, or the scorer reads none
    vote: str | None  # what counts in a majority vote: the answer, or the text
    well_formed: bool
    failed: bool  # it could not be scored
    episode: EpisodeSummary | None = None  # where the completion is one


def build_rows(
    model: ModelName,
    problems: Problems,
    greedy: Sequence[Judged],
    samples: Sequence[Sequence[Judged]],
) -> pd.DataFrame:
    """Return one model's N greedy and N × n sampled completions as N rows with these `COLUMNS`.

    Raises DataError when the lists don't fit together.
    """
    if model not in get_args(ModelName):
        raise DataError(f"model={model!r} is unknown; choose one of {get_args(ModelName)}")
    sizes = {name: len(getattr(problems, name)) for name in Problems.__slots__}
    sizes |= {"greedy": len(greedy), "samples": len(samples)}
    if len(set(sizes.values())) > 1:
        raise DataError(f"an evaluation needs one entry a problem in every list, got {sizes}")
    if not greedy:
        raise DataError("an evaluation needs at least one problem; the test split is empty")
    rows: list[dict[str, object]] = []
    for i, (first, sampled) in enumerate(zip(greedy, samples, strict=True)):
        if not sampled:
            raise DataError(f"problem {i} has no samples; give at least one")
        majority = majority_vote([sample.vote for sample in sampled])
        winners = (sample for sample in sampled if majority is not None and sample.vote == majority)
        winner, n = next(winners, None), len(sampled)
        rows.append(
            {
                "dataset": problems.dataset[i],
                "index": int(problems.index[i]),
                "data_source": problems.data_source[i],
                "level": problems.level[i],
                "prompt": problems.prompt[i],
                "ground_truth": problems.ground_truth[i],
                "model": model,
                "greedy_completion": _storable(first.text),
                "greedy_answer": _storable(first.answer),
                "greedy_correct": first.correct,
                "greedy_score": float(first.score),
                "greedy_truncated": first.truncated,
                "sample_answers": [_storable(sample.answer) for sample in sampled],
                "samples_correct": sum(sample.correct for sample in sampled),
                "samples": n,
                "sample_score": sum(sample.score for sample in sampled) / n,
                "majority_answer": _storable(winner.answer) if winner else None,
                "majority_correct": winner is not None and winner.correct,
                "response_length": sum(sample.tokens for sample in sampled) / n,
                "greedy_length": first.tokens,
                "truncated": sum(sample.truncated for sample in sampled) / n,
                "format_rate": format_rate([sample.well_formed for sample in sampled]),
                "errors": sum(sample.failed for sample in (first, *sampled)),
            }
            | _episode_columns(first, sampled)
        )
    episode_columns = list(EPISODE_COLUMNS) if any(sample.episode for sample in greedy) else []
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *episode_columns])
    # A column of None alone would otherwise be typed by chance.
    return frame.astype({"greedy_answer": "str", "majority_answer": "str"})


def _episode_columns(first: Judged, samples: Sequence[Judged]) -> dict[str, object]:
    """Return the cells of `EPISODE_COLUMNS`; none where completions are no episodes."""
    greedy, sampled = first.episode, [sample.episode for sample in samples if sample.episode]
    if greedy is None:
        return {}
    n = len(sampled)
    return {
        "greedy_turns": greedy.turns,
        "greedy_return": float(greedy.reward),
        "greedy_calls": greedy.calls,
        "greedy_malformed": greedy.malformed,
        "greedy_end": greedy.end,
        "sample_turns": sum(episode.turns for episode in sampled) / n,
        "sample_return": float(sum(episode.reward for episode in sampled)) / n,
        "sample_called": sum(episode.calls > 0 for episode in sampled) / n,
        "sample_malformed": sum(episode.malformed for episode in sampled) / n,
    }


def prompt_digest(rows: pd.DataFrame) -> str:
    """Return the SHA-256 (hex) of the problems of one model's rows: order, text and truth."""
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
        row, column = next(
            (row, column)
            for row in range(len(before))
            for column in _IDENTITY
            if str(before[column].iloc[row]) != str(after[column].iloc[row])
        )
        raise DataError(
            f"evaluation rows differ in {column!r} at row {row}: {before[column].iloc[row]!r} "
            f"before, {after[column].iloc[row]!r} after; evaluate both models on the same "
            "problems in the same order"
        )
    return digest


def _storable(text: str | None) -> str | None:
    """Replace lone surrogates, which a model can emit and Parquet can't hold, by question marks."""
    return text if text is None else text.encode("utf-8", "replace").decode("utf-8")
