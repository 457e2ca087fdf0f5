"""Which rows of newly arrived files retraining may use, and how many old rows are replayed.

A row is new when no held-out split of the champion's dataset contains its prompt, and the
champion's `train` does not contain the prompt with the same ground truth. A corrected answer is
new. Prompts are compared without case and spacing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from engine.data.columns import truth_of
from engine.data.evaluation_sets import evaluation_files
from engine.data.incremental_data import NewFiles, read_new_files
from engine.data.rows import RULE, normalise, prompt_text

HELD_OUT = ("validation", "sft_validation")  # and the evaluation sets, `test` among them


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of new files that a retraining run may train on."""

    rows: pd.DataFrame  # each prompt once, in the order of arrival, with all columns of the files
    total: int  # rows in the new files, e.g. 70

    @property
    def dropped(self) -> int:
        """Number of rows that are repeated, held out, or trained on already."""
        return self.total - len(self.rows)


def find_new_rows(dataset: Path, new_files: NewFiles) -> NewRows:
    """Read the files of `new_files` and keep the rows that are new to the dataset folder `dataset`.

    Raises as `incremental_data.read_new_files` does.
    """
    arrived = pd.DataFrame(read_new_files(new_files))
    if arrived.empty:
        return NewRows(arrived, 0)
    keys = prompt_keys(arrived)
    judged = [path.stem for path in evaluation_files(dataset).values()]
    seen = {key for name in (*HELD_OUT, *judged) for key in prompt_keys(_read_split(dataset, name))}
    train = _read_split(dataset, "train")
    trained = set(zip(prompt_keys(train), map(truth_of, train[RULE]), strict=True))
    kept = []
    for key, rule in zip(keys, arrived[RULE], strict=True):
        kept.append(key not in seen and (key, truth_of(rule)) not in trained)
        if kept[-1]:
            seen.add(key)
    return NewRows(arrived[kept].reset_index(drop=True), len(arrived))


def sample_replay(old: pd.DataFrame, new: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Sample rows of `old` so that they make up `share` of the new training set.

    Each prompt at most once, and none that is in `new`; fewer rows where `old` has too few.
    """
    seen = set(prompt_keys(new))
    kept = []
    for key in prompt_keys(old):
        kept.append(key not in seen)
        seen.add(key)
    candidates = old[kept].reset_index(drop=True)
    count = min(len(candidates), round(len(new) * share / (1 - share)))
    return candidates.sample(n=count, random_state=seed)


def prompt_keys(frame: pd.DataFrame) -> list[str]:
    """The text of each row's prompt, without case and spacing."""
    return [normalise(prompt_text(prompt)) for prompt in frame["prompt"]]


def _read_split(dataset: Path, name: str) -> pd.DataFrame:
    return pd.read_parquet(dataset / f"{name}.parquet")
