"""Pairs and labels of a policy's own completions: best and worst, ties, what is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engine.config import RowsConfig
from engine.data.contract import KTO_ROWS, PREFERENCE_PAIRS, check
from engine.data.preference_rows import (
    ScoredCompletion,
    ScoredGroup,
    labels_from_groups,
    pairs_from_groups,
    read_preference_rows,
)
from engine.errors import DataError

QUESTION = [{"role": "user", "content": "1+1?"}]


def group(*scored: tuple[str, float | None], **info: Any) -> ScoredGroup:
    return ScoredGroup(QUESTION, [ScoredCompletion(*one) for one in scored], info)


def sides(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["chosen"], row["rejected"]) for row in rows]


def test_best_and_worst_of_a_group_are_a_pair() -> None:
    one = group(("b", 0.5), ("a", 0.9), ("d", -1.0), ("c", 0.1), policy_version=3)
    [row] = pairs_from_groups([one])
    assert row == {
        "prompt": QUESTION,
        "chosen": "a",
        "rejected": "d",
        "margin": 0.0,
        "extra_info": {"policy_version": 3, "chosen_score": 0.9, "rejected_score": -1.0},
    }
    [with_margin] = pairs_from_groups([one], margins=True)
    assert with_margin["margin"] == pytest.approx(1.9)


def test_of_equal_scores_the_first_counts() -> None:
    one = group(("w1", 0.0), ("r1", 1.0), ("r2", 1.0), ("w2", 0.0), ("w3", 0.0))
    assert sides(pairs_from_groups([one])) == [("r1", "w1")]
    assert sides(pairs_from_groups([one], pairs_per_group=9)) == [("r1", "w1"), ("r2", "w2")]


def test_no_text_is_in_two_pairs_of_a_group() -> None:
    one = group(("a", 3.0), ("b", 2.0), ("c", 1.0))
    assert sides(pairs_from_groups([one], pairs_per_group=5)) == [("a", "c")]
    again = group(("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 0.0))
    assert sides(pairs_from_groups([again], pairs_per_group=5)) == [("a", "b")]


def test_groups_without_a_gap_give_no_pair() -> None:
    even, near, alone = group(("a", 1.0), ("b", 1.0)), group(("a", 1.0), ("b", 0.8)), group()
    assert pairs_from_groups([even, alone]) == []
    assert pairs_from_groups([near], min_gap=0.2) == []
    assert len(pairs_from_groups([near], min_gap=0.1)) == 1


def test_failed_rewards_cut_and_empty_completions_are_left_out() -> None:
    cut = ScoredCompletion("long", 9.0, truncated=True)
    rest = group(("a", 1.0), ("x", None), ("y", math.nan), (" ", -5.0), ("b", 0.0))
    one = ScoredGroup(QUESTION, [cut, *rest.completions])
    assert sides(pairs_from_groups([one], pairs_per_group=9)) == [("a", "b")]
    assert [row["completion"] for row in labels_from_groups([one])] == ["a", "b"]


def test_labels_are_by_threshold_and_need_no_partner() -> None:
    rows = labels_from_groups([group(("a", 1.0), ("b", 1.0)), group(("c", 0.5), ("d", 0.6))])
    assert [(row["completion"], row["label"]) for row in rows] == [
        ("a", True),
        ("b", True),
        ("c", False),
        ("d", True),
    ]
    few = labels_from_groups([group(("a", 1.0), ("b", 0.0), ("c", 1.0), ("d", 0.0))], per_group=1)
    assert [row["completion"] for row in few] == ["a", "b"]


def test_rows_keep_the_contract_and_are_read_back(tmp_path: Path) -> None:
    groups = [group(("2", 1.0), ("3", 0.0), policy_version=1)]
    pairs, labels = pairs_from_groups(groups, margins=True), labels_from_groups(groups)
    check(pd.DataFrame(pairs), PREFERENCE_PAIRS, "pairs")
    check(pd.DataFrame(labels), KTO_ROWS, "labels")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    [file] = read_preference_rows([str(tmp_path / "pairs.jsonl")], RowsConfig(), "pairs")
    wanted = {name: value for name, value in pairs[0].items() if name != "extra_info"}
    assert file.rows == [wanted]


@pytest.mark.parametrize("wrong", [{"pairs_per_group": 0}, {"min_gap": -1.0}])
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="must be"):
        pairs_from_groups([group(("a", 1.0), ("b", 0.0))], **wrong)
