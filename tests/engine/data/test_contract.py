"""The contract of rows, and RL rows that keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import RowsConfig
from engine.data.collate import collate_prompts
from engine.data.contract import (
    EVALUATION_ROWS,
    KTO_ROWS,
    PREFERENCE_PAIRS,
    RL_PROMPTS,
    SFT_PAIRS,
    check,
    check_disjoint,
)
from engine.data.row_files import read_file_rows
from engine.data.rows import (
    canonical_row,
    has_words,
    is_messages,
    rl_row,
    same_columns,
    sft_row,
    user_message,
)
from engine.errors import DataError
from engine.evaluation.results import Judged, build_rows
from engine.rewards.calls import RewardRows
from engine.storage.readers import parse_rows

SIZE = 12


def rl(texts: list[str] | None = None) -> pd.DataFrame:
    texts = texts or [f"What is {i}+1?" for i in range(SIZE)]
    return pd.DataFrame([rl_row("sums", t, "5", {"index": i}) for i, t in enumerate(texts)])


def sft() -> pd.DataFrame:
    return pd.DataFrame([sft_row(f"What is {i}+1?", "#### 5", {}) for i in range(SIZE)])


def preference() -> pd.DataFrame:
    row = {"prompt": user_message("Which?"), "chosen": "This.", "rejected": "That."}
    return pd.DataFrame([row] * SIZE)


def kto() -> pd.DataFrame:
    row = {"prompt": user_message("Which?"), "completion": "This.", "label": True}
    return pd.DataFrame([row] * SIZE)


def evaluation() -> pd.DataFrame:
    problems = pd.DataFrame(
        {
            "dataset": "test",
            "index": range(SIZE),
            "data_source": "sums",
            "level": "",
            "prompt": "2+3?",
            "ground_truth": "5",
        }
    )

    def judged(answer: str | None) -> Judged:
        return Judged(answer or "", 2, False, answer == "5", 1.0, answer, answer, True, False)

    greedy = [judged("5" if i % 2 else None) for i in range(SIZE)]
    return build_rows("rl", problems, greedy, [[judged("5"), judged("6")]] * SIZE)


TABLES = [
    (rl, RL_PROMPTS),
    (sft, SFT_PAIRS),
    (preference, PREFERENCE_PAIRS),
    (kto, KTO_ROWS),
    (evaluation, EVALUATION_ROWS),
]


def broken(frame: pd.DataFrame, column: str, value: Any, rows: tuple[int, ...]) -> pd.DataFrame:
    """Return the frame with `value` in some rows of a column."""
    cells = frame[column].tolist()
    for row in rows:
        cells[row] = value
    return frame.assign(**{column: pd.Series(cells, dtype=object)})


@pytest.mark.parametrize(("make", "schema"), TABLES)
def test_good_tables_pass_before_and_after_parquet(
    make: Any, schema: pa.DataFrameSchema, tmp_path: Path
) -> None:
    frame = make()
    check(frame, schema, "train")
    frame.assign(**({"extra_info": [{"a": 1}] * SIZE} if "extra_info" in frame else {})).to_parquet(
        tmp_path / "t.parquet"
    )
    check(pd.read_parquet(tmp_path / "t.parquet"), schema, "train")


@pytest.mark.parametrize(("make", "schema"), TABLES)
def test_every_required_column_is_required(make: Any, schema: pa.DataFrameSchema) -> None:
    frame = make()
    for column in frame.columns:
        if column == "extra_info":
            check(frame.drop(columns=column), schema, "train")
            continue
        with pytest.raises(DataError, match=f"^train has no column '{column}'; its columns must"):
            check(frame.drop(columns=column), schema, "train")


def test_a_misspelt_column_is_named_on_both_sides() -> None:
    frame = sft().rename(columns={"response": "reponse"})
    with pytest.raises(DataError, match="no column 'response' and has an unknown column 'reponse'"):
        check(frame, SFT_PAIRS, "sft_train")


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="validation has no rows"):
        check(rl().head(0), RL_PROMPTS, "validation")


@pytest.mark.parametrize(
    ("make", "schema", "column", "value", "problem"),
    [
        (rl, RL_PROMPTS, "prompt", [], "must not be empty"),
        (rl, RL_PROMPTS, "prompt", user_message(" \n"), "must not be empty"),
        (rl, RL_PROMPTS, "prompt", "2+3?", "must be chat messages"),
        (rl, RL_PROMPTS, "prompt", None, "must be chat messages"),
        (rl, RL_PROMPTS, "prompt", [{"role": "user"}], "must be chat messages"),
        (rl, RL_PROMPTS, "prompt", np.array(user_message("")), "must not be empty"),
        (rl, RL_PROMPTS, "prompt", user_message("\ud83d"), "must hold whole characters"),
        (rl, RL_PROMPTS, "reward_model", {"ground_truth": np.float32("nan")}, "must hold a ground"),
        (rl, RL_PROMPTS, "reward_model", {"style": "rule"}, "must hold a ground_truth"),
        (rl, RL_PROMPTS, "reward_model", {"ground_truth": None}, "must hold a ground_truth"),
        (rl, RL_PROMPTS, "reward_model", {"ground_truth": " "}, "must hold a ground_truth"),
        (rl, RL_PROMPTS, "reward_model", {"ground_truth": np.nan}, "must hold a ground_truth"),
        (rl, RL_PROMPTS, "reward_model", "5", "must be a dictionary"),
        (rl, RL_PROMPTS, "data_source", 7, "must be text"),
        (rl, RL_PROMPTS, "data_source", "", "must not be empty"),
        (rl, RL_PROMPTS, "ability", None, "must be text"),
        (rl, RL_PROMPTS, "extra_info", 1, "must be a dictionary"),
        (sft, SFT_PAIRS, "response", "  ", "must not be empty"),
        (sft, SFT_PAIRS, "response", "5\udc00", "must hold whole characters"),
        (sft, SFT_PAIRS, "response", None, "must be text"),
        (preference, PREFERENCE_PAIRS, "chosen", "", "must not be empty"),
        (preference, PREFERENCE_PAIRS, "rejected", 5, "must be text"),
        (kto, KTO_ROWS, "completion", "", "must not be empty"),
        (kto, KTO_ROWS, "label", 1, "must be true or false"),
        (evaluation, EVALUATION_ROWS, "model", "other", "must be warm_start, rl or champion"),
        (evaluation, EVALUATION_ROWS, "samples", -1, "must be a whole number"),
        (evaluation, EVALUATION_ROWS, "samples", True, "must be a whole number"),
        (evaluation, EVALUATION_ROWS, "greedy_answer", 5, "must be text or missing"),
        (evaluation, EVALUATION_ROWS, "greedy_correct", "yes", "must be true or false"),
        (evaluation, EVALUATION_ROWS, "response_length", float("inf"), "must be a finite number"),
        (evaluation, EVALUATION_ROWS, "format_rate", 1.5, "must be at most 1"),
        (evaluation, EVALUATION_ROWS, "sample_answers", "5", "must be a list"),
    ],
)
def test_wrong_cells_are_named_with_split_column_problem_and_rows(
    make: Any, schema: pa.DataFrameSchema, column: str, value: Any, problem: str
) -> None:
    frame = broken(make(), column, value, rows=(3, 7)).set_index(pd.Index(range(100, 100 + SIZE)))
    with pytest.raises(DataError) as caught:
        check(frame, schema, "train")
    message = str(caught.value)
    assert message.startswith(f"train: column {column!r} {problem}")
    assert f"2 of {SIZE} rows (rows 3, 7): row 3 has " in message
    assert "\n" not in message


def test_only_the_first_rows_are_listed() -> None:
    frame = broken(sft(), "response", "", rows=tuple(range(2, 12)))
    with pytest.raises(DataError, match=r"10 of 12 rows \(rows 2, 3, 4, 5, 6, …\)"):
        check(frame, SFT_PAIRS, "sft_train")


def test_a_pair_must_differ() -> None:
    frame = broken(preference(), "rejected", "This.", rows=(4,))
    with pytest.raises(DataError, match=r"'chosen' and 'rejected' must differ.*\(row 4\)"):
        check(frame, PREFERENCE_PAIRS, "train")


def splits() -> dict[str, pd.DataFrame]:
    train, validation = [f"train {i}" for i in range(5)], [f"validation {i}" for i in range(5)]
    return {
        "sft_train": rl(train),
        "sft_validation": rl(validation),
        "train": rl(train),
        "validation": rl(validation),
        "test": rl([f"test {i}" for i in range(5)]),
    }


def test_sft_and_rl_may_share_prompts() -> None:
    check_disjoint(splits())


@pytest.mark.parametrize(
    ("held_out", "other"),
    [
        ("test", "sft_train"),
        ("test", "sft_validation"),
        ("test", "train"),
        ("test", "validation"),
        ("validation", "train"),
        ("validation", "sft_train"),
        ("sft_validation", "sft_train"),
        ("sft_validation", "train"),
    ],
)
def test_a_prompt_in_two_splits_is_named_with_both_rows(held_out: str, other: str) -> None:
    frames = splits()
    # Splits that share their prompts with these two would be named first.
    if "validation" in (held_out, other):
        del frames["sft_validation"]
    if other == "train":
        del frames["sft_train"]
    text = frames[other]["prompt"].iloc[1][0]["content"]
    shared = rl([f"{held_out} x", "y", "z", f"  {text.upper().replace(' ', chr(10))} "])
    frames[held_out] = shared.set_index(pd.Index([9, 8, 7, 6]))
    with pytest.raises(DataError, match=rf"^1 prompts are in both {held_out} and {other} ") as e:
        check_disjoint(frames)
    assert "(rows 3 and 1; the first is " in str(e.value)


def test_only_the_first_shared_rows_are_listed() -> None:
    frames = splits()
    frames["test"] = pd.concat(
        [rl([f"new {i}" for i in range(3)]), rl([f"train {i}" for i in range(5)])]
    )
    del frames["sft_train"]
    with pytest.raises(DataError, match=r"^5 prompts are in both test and train \(rows 3 and 0, 4"):
        check_disjoint(frames)


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


def canonical_rows(rows: list[Row]) -> list[Row]:
    numbered = enumerate(rows, start=1)
    return same_columns([canonical_row(row, f"d.jsonl, row {i}") for i, row in numbered])


def test_values_stay_as_they_are_and_what_only_some_rows_have_is_none() -> None:
    rows = canonical_rows([{"prompt": "a", "level": 1}, {"prompt": "b"}])
    assert [row["level"] for row in rows] == [1, None]
    assert rows[0] == {
        "prompt": [{"role": "user", "content": "a"}],
        "level": 1,
        "data_source": "file",
        "ability": "",
        "extra_info": {},
        "reward_model": {"style": "rule", "ground_truth": None},
    }
    assert canonical_rows(rows) == rows


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "  "}, "column 'prompt' is '  '; give a string"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt': the content of a message"),
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
        canonical_rows([{"prompt": "ok"}, {"prompt": "ok", **columns}])


def test_a_value_of_megabytes_is_shown_in_short() -> None:
    with pytest.raises(DataError) as caught:
        canonical_rows([{"prompt": "ok", "extra_info": "x" * 10_000_000}])
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
        parsed = [row for _, row in parse_rows(data, "d.jsonl")]
        for row in parsed:
            if isinstance(row, DataError):
                raise row
        rows = canonical_rows(parsed)
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
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        RewardRows(["p"] * len(rows), ["c"] * len(rows), columns)
        json.dumps(rows, ensure_ascii=False).encode()
        assert canonical_rows(rows) == rows
    assert message.startswith("d.jsonl")
    assert len(message.encode()) < 1000
