"""The table of an evaluation: one row a problem and model, built from completions with scores.

It also checks that two tables can be compared: same problems, same order, same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd

from engine.data import contract
from engine.data.rows import EPISODE_COLUMNS, EVALUATION_ROWS, prompt_text
from engine.errors import DataError
from engine.evaluation.metrics import majority_vote

if TYPE_CHECKING:
    from engine.agents.episode import EpisodeSummary

ModelName = Literal["warm_start", "rl", "champion"]

# The columns that identify a problem.
_IDENTITY = ["dataset", "index", "data_source", "prompt", "ground_truth"]


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


def problem_rows(sets: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The columns of the table that come before `model`: a row for each of the sets' RL rows."""
    frame = pd.concat(list(sets.values()), ignore_index=True)
    infos = list(frame["extra_info"]) if "extra_info" in frame else [None] * len(frame)
    extra = [info if isinstance(info, Mapping) else {} for info in infos]
    levels = [(row.get("level"), row.get("difficulty")) for row in extra]
    return pd.DataFrame(
        {
            "dataset": [name for name, rows in sets.items() for _ in range(len(rows))],
            "index": [position for rows in sets.values() for position in range(len(rows))],
            "data_source": frame["data_source"],
            "level": [str(next((x for x in pair if x is not None), "")) for pair in levels],
            "prompt": [prompt_text(prompt) for prompt in frame["prompt"]],
            "ground_truth": [str(rule["ground_truth"]) for rule in frame["reward_model"]],
        }
    )


def build_rows(
    model: ModelName,
    problems: pd.DataFrame,
    greedy: Sequence[Judged],
    samples: Sequence[Sequence[Judged]],
) -> pd.DataFrame:
    """One model's N greedy and N × n sampled completions as N rows of the contract's columns.

    `problems` has N rows with the columns that come before `model`.
    """
    rows: list[dict[str, object]] = []
    for first, sampled in zip(greedy, samples, strict=True):
        majority = majority_vote([sample.vote for sample in sampled])
        winners = (sample for sample in sampled if majority is not None and sample.vote == majority)
        winner, n = next(winners, None), len(sampled)
        rows.append(
            {
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
                "format_rate": sum(sample.well_formed for sample in sampled) / n,
                "errors": sum(sample.failed for sample in (first, *sampled)),
            }
            | _episode_columns(first, sampled)
        )
    answers = pd.DataFrame(rows, index=problems.index)
    frame = pd.concat([problems.assign(model=model), answers], axis=1)
    names = [name for name in (*EVALUATION_ROWS, *EPISODE_COLUMNS) if name in frame]
    # A column of None alone would otherwise be typed by chance.
    return frame[names].astype({"greedy_answer": "str", "majority_answer": "str"})


def _episode_columns(first: Judged, samples: Sequence[Judged]) -> dict[str, object]:
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


def read_rows(evaluation: Path, model: str) -> pd.DataFrame:
    """Read `rows_<model>.parquet` of an evaluation; DataError unless it keeps the data contract."""
    rows = pd.read_parquet(evaluation / f"rows_{model}.parquet")
    contract.check(rows, contract.EVALUATION_ROWS, f"rows_{model}.parquet of {evaluation}")
    return rows


def prompt_digest(rows: pd.DataFrame) -> str:
    """The SHA-256 (hex) of the problems of one model's rows: order, text and truth."""
    lines = rows[_IDENTITY].itertuples(index=False, name=None)
    canonical = json.dumps([[str(field) for field in line] for line in lines])
    return hashlib.sha256(canonical.encode()).hexdigest()


def require_problems(rows: pd.DataFrame, sets: Mapping[str, pd.DataFrame], where: str) -> None:
    """Raise DataError unless rows are of each problem of the sets once, in order.

    sets: a dataset's RL rows by evaluation set. where: what holds the rows, for the message.
    """
    problems = problem_rows(sets)
    if prompt_digest(rows) == prompt_digest(problems):
        return
    keys, known = (
        set(table[_IDENTITY].astype(str).itertuples(index=False, name=None))
        for table in (rows, problems)
    )
    raise DataError(
        f"{where} has {len(rows)} rows, and the evaluation sets of its dataset have "
        f"{len(problems)} problems: {len(keys - known)} of other problems, "
        f"{len(rows) - len(keys)} of a problem that is there already, {len(known - keys)} problems "
        "without a row; evaluate the model again on the whole dataset"
    )


def check_paired(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """Return the prompt digest that both tables share.

    Raises DataError, naming the first row that differs, when the tables hold other problems,
    another order or number of them, or more than one model each.
    """
    for side, rows in (("before", before), ("after", after)):
        if missing := [column for column in EVALUATION_ROWS if column not in rows]:
            raise DataError(f"evaluation rows ({side}) lack the columns {missing}; evaluate again")
        models = sorted(map(str, rows["model"].unique()))
        if len(models) != 1:
            raise DataError(
                f"evaluation rows ({side}) must hold one model, got {models}; select one first"
            )
    if len(before) != len(after):
        raise DataError(
            f"the models were asked {len(before)} and {len(after)} problems; "
            "evaluate both on the same test set"
        )
    digest = prompt_digest(before)
    if digest != prompt_digest(after):
        first, second = (rows[_IDENTITY].astype(str).to_numpy() for rows in (before, after))
        row, column = next(zip(*(first != second).nonzero(), strict=True))
        raise DataError(
            f"evaluation rows differ in {_IDENTITY[column]!r} at row {row}: "
            f"{first[row, column]!r} before, {second[row, column]!r} after; evaluate both models "
            "on the same problems in the same order"
        )
    return digest


def _storable(text: str | None) -> str | None:
    """Replace lone surrogates, which a model can emit and Parquet can't hold, by question marks."""
    return text if text is None else text.encode("utf-8", "replace").decode("utf-8")
