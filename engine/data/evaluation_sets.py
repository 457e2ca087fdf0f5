"""Evaluation sets: problems of files of their own, which models are judged on besides `test`.

They are read as training files are, each with its own columns (`data.evaluation_sets`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from engine.config import DataConfig, EvaluationSetConfig
from engine.data.bad_rows import BadRows, mapped_rows
from engine.data.columns import uniform_columns
from engine.data.files import rl_columns
from engine.data.sources import OF_ONE_FORM
from engine.data.split_names import address_digest, split_addresses
from engine.errors import DataError
from engine.storage.json_rows import Row


def read_evaluation_sets(
    config: DataConfig, seed: int
) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """The rows of every set by name, and what was left out, a sentence each.

    Raises DataError for a set without a row, and for bad rows where `data.bad_rows` is "fail".
    """
    frames, notes = {}, list[str]()
    for one in config.evaluation_sets:
        rows = _rows(one, config, notes)
        if one.size and len(rows) > one.size:
            notes.append(f"{one.split}: {one.size} of {len(rows)} rows, by seed")
            rows = [rows[place] for place in _drawn(len(rows), one, seed)]
        frames[one.name] = uniform_columns(pd.DataFrame(rows, dtype=object))
    return frames, tuple(notes)


def evaluation_sets_digest(config: DataConfig) -> str:
    """SHA-256 (hex) of the files of all sets; empty without sets."""
    parts = [
        f"{one.name}\0{address_digest(address)}"
        for one in config.evaluation_sets
        for address in _addresses(one)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def _rows(one: EvaluationSetConfig, config: DataConfig, notes: list[str]) -> list[Row]:
    own = {"columns": one.columns, "templates": one.templates}
    given = own if one.columns or one.templates or config.source in OF_ONE_FORM else {}
    source = one.data_source or one.name
    settings = config.model_copy(update={"data_source": source, **given})
    rows: list[Row] = []
    for address in _addresses(one):
        bad = BadRows(address, config.bad_rows)
        for number, row in mapped_rows(address, settings, bad, need_truth=True):
            rows.append(rl_columns(row, number, one.split))
        bad.check()
        notes += filter(None, [bad.sentence()])
    if not rows:
        raise DataError(f"data.evaluation_sets.{one.name}: no row of {one.path} is left; {notes}")
    return rows


def _addresses(one: EvaluationSetConfig) -> Sequence[str]:
    """Those of its test split; of a place without one, of validation, or all there is."""
    places = split_addresses(one.path, {}, need_train=False)
    return places.get("test") or places.get("validation") or places["train"]


def _drawn(count: int, one: EvaluationSetConfig, seed: int) -> list[int]:
    """Places of `one.size` rows of `count`, in order."""

    def rank(place: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{one.name}/{place}".encode(), digest_size=8).digest()

    return sorted(sorted(range(count), key=rank)[: one.size])


def evaluation_files(dataset: Path) -> dict[str, Path]:
    """The tables of a dataset's folder that models are judged on, by set: `test` first."""
    more = sorted(dataset.glob("test_*.parquet"))
    own = {path.stem.removeprefix("test_"): path for path in more}
    return {"test": dataset / "test.parquet"} | own
