"""Preferences of files: what is held out, and what is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import DataConfig, PairsConfig
from engine.errors import DataError
from engine.evaluation.results import Judged
from engine.preferences import is_usable, read_preference_tables


def write(path: Path, prompts: int) -> str:
    rows = [
        {"question": f"What is {i} plus {i + 1}?", "good": str(2 * i + 1), "bad": str(side)}
        for i in range(prompts)
        for side in (-1, -2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(path: str, size: int) -> PairsConfig:
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    return PairsConfig(path=path, columns=columns, validation_size=size)


def test_all_rows_of_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", 20)
    found = read_preference_tables(config(path, 7), DataConfig(), "pairs", [], seed=0)
    assert (len(found.train), len(found.validation)) == (32, 8)
    sides = [
        {row[0]["content"] for row in one["prompt"]} for one in (found.train, found.validation)
    ]
    assert not sides[0] & sides[1]
    assert found.train["margin"].tolist() == [0.0] * 32


def test_prompts_of_a_test_set_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", 10)
    test = [[{"role": "user", "content": "what is 3 plus 4"}]]
    found = read_preference_tables(config(path, 0), DataConfig(), "pairs", test, seed=0)
    assert len(found.train) == 18
    assert found.notes == ("2 rows have prompts of a test set, and are left out",)


def test_nothing_left_to_learn_from(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", 3)
    with pytest.raises(DataError, match=r"leaves no row to learn from: 6 rows, 0 of them"):
        read_preference_tables(config(path, 6), DataConfig(), "pairs", [], seed=0)


@pytest.mark.parametrize(
    "change",
    [{"failed": True}, {"truncated": True}, {"score": float("nan")}]
    + [{"text": text} for text in (" ", "a\0", "\ud83d")],
)
def test_failed_cut_and_empty_completions_are_left_out(change: dict[str, Any]) -> None:
    good = Judged("5", 2, False, True, 1.0, "5", "5", True, False)
    assert is_usable(good)
    assert not is_usable(replace(good, **change))
