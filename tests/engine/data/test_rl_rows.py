"""RL rows of files: each has one canonical form, or is refused by its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import RowsConfig
from engine.data.collate import collate_prompts
from engine.data.row_files import read_file_rows
from engine.data.rows import canonical_rows, has_words, is_messages
from engine.errors import DataError
from engine.rewards.calls import RewardRows
from engine.storage.readers import parse_rows

Row = dict[str, Any]


def read_rl_rows(path: Path) -> list[Row]:
    return read_file_rows(str(path), RowsConfig()).rows


def truths(rows: list[Row]) -> list[Any]:
    """What a reward gets to see."""
    batch = collate_prompts(rows, [[1]] * len(rows))
    return list(batch.columns["ground_truth"])


def written(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_places_of_the_ground_truth_may_be_mixed(tmp_path: Path) -> None:
    rows = read_rl_rows(
        written(
            tmp_path / "d.jsonl",
            {"prompt": "1+1?", "ground_truth": 2},
            {"prompt": "1+2?", "reward_model": {"ground_truth": "3", "style": "model"}},
            {"prompt": "1+3?", "reward_model": {"style": "rule"}, "ground_truth": "4"},
            {"prompt": "1+4?", "reward_model": {"ground_truth": 5.0}, "ground_truth": "5"},
        )
    )
    assert truths(rows) == [2, "3", "4", "5"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [2, "3", "4", "5"]
    assert rows[1]["reward_model"]["style"] == "model"
    assert all("ground_truth" not in row for row in rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_nan_is_no_ground_truth(tmp_path: Path, suffix: str) -> None:
    def write(name: str, values: list[float]) -> Path:
        rows = [{"prompt": "1+1?", "ground_truth": value} for value in values]
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".jsonl":
            return written(path, *rows)
        pd.DataFrame(rows).to_parquet(path)
        return path

    nan = float("nan")
    message = r"some\.\w+: 2 of 3 rows have no ground truth \(rows 2, 3\); give reward_model"
    with pytest.raises(DataError, match=message):
        read_rl_rows(write("some", [2.0, nan, nan]))
    assert truths(read_rl_rows(write("none", [nan, nan]))) == [None, None]
    with pytest.raises(DataError, match=r"none: 1 of 1 rows .* \(row 1\); give .* in all rows$"):
        canonical_rows([{"prompt": "1?", "reward_model": {"ground_truth": nan}}], "none",
                       need_truth=True)  # fmt: skip


def test_values_stay_as_they_are_and_what_only_some_rows_have_is_none() -> None:
    rows = canonical_rows([{"prompt": "a", "level": 1}, {"prompt": "b"}], "d.jsonl")
    assert [row["level"] for row in rows] == [1, None]
    assert rows[0] == {
        "prompt": [{"role": "user", "content": "a"}],
        "level": 1,
        "data_source": "file",
        "ability": "",
        "extra_info": {},
        "reward_model": {"style": "rule", "ground_truth": None},
    }
    assert canonical_rows(rows, "d.jsonl") == rows


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "  "}, "column 'prompt' is '  '; give a string"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt' is"),
        ({"prompt": [{"role": "user", "content": " "}]}, "column 'prompt' is"),
        ({"prompt": "\ud83d"}, r"column 'prompt' is '\\ud83d'"),
        ({"reward_model": "5"}, "column 'reward_model' is '5'; give"),
        ({"reward_model": []}, r"column 'reward_model' is \[\]; give"),
        ({"extra_info": "x"}, "column 'extra_info' is 'x'; give a dictionary, or none"),
        ({"data_source": 5}, "column 'data_source' is 5; give text, or none"),
        ({"ability": ["math"]}, r"column 'ability' is \['math'\]; give text, or none"),
        (
            {"ground_truth": "5", "reward_model": {"ground_truth": 6}},
            r"column 'ground_truth' is '5', but reward_model\.ground_truth is 6; keep the right",
        ),
        ({"prompt_ids": [7]}, "column 'prompt_ids' has the name of a field that the engine fills"),
        ({"prompts": "x"}, "column 'prompts' has the name of a field that the engine fills"),
        ({"completions": "x"}, "column 'completions' has the name"),
        ({"advantages": 1.0}, "column 'advantages' has the name"),
    ],
)
def test_a_row_without_one_form_is_refused_by_number(columns: Row, message: str) -> None:
    with pytest.raises(DataError, match=rf"^d\.jsonl, row 2: {message}"):
        canonical_rows([{"prompt": "ok"}, {"prompt": "ok", **columns}], "d.jsonl")


def test_a_value_of_megabytes_is_shown_in_short() -> None:
    with pytest.raises(DataError) as caught:
        canonical_rows([{"prompt": "ok", "extra_info": "x" * 10_000_000}], "d.jsonl")
    assert len(str(caught.value)) < 200


TEXTS = st.text(st.characters(exclude_categories=[]) | st.sampled_from("\ud83d a5"), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=2
)
TRUTHS = st.sampled_from([5, "5", 5.0, float("nan"), None, ""])
NAMES = st.sampled_from(["extra_info", "data_source", "level", "prompts", "completion"]) | TEXTS
ROWS = st.builds(
    dict.__or__,
    st.fixed_dictionaries(
        {"prompt": st.just("1+1?") | MESSAGES | VALUES},
        optional={
            "ground_truth": TRUTHS | VALUES,
            "reward_model": st.fixed_dictionaries({"ground_truth": TRUTHS}) | VALUES,
        },
    ),
    st.dictionaries(NAMES, VALUES, max_size=2),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a loaded machine
@given(st.lists(ROWS, min_size=1, max_size=3))
def test_any_json_rows_are_canonical_or_refused(given_rows: list[Row]) -> None:
    data = "\n".join(json.dumps(row) for row in given_rows).encode()
    try:
        rows = canonical_rows(parse_rows(data, "d.jsonl"), "d.jsonl")
    except DataError as error:
        message = str(error)
    else:
        message = "d.jsonl"
        for row in rows:
            assert is_messages(row["prompt"])
            assert has_words(row["prompt"])
            assert isinstance(row["extra_info"], dict)
            assert row.keys() == rows[0].keys()
        seen = truths(rows)
        assert all(truth == truth for truth in seen)
        assert len({truth is None for truth in seen}) == 1
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        RewardRows(["p"] * len(rows), ["c"] * len(rows), columns)
        json.dumps(rows, ensure_ascii=False).encode()
        assert canonical_rows(rows, "d.jsonl") == rows
    assert message.startswith("d.jsonl")
    assert len(message.encode()) < 1000
