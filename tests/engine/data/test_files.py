"""The source `files`: splits by name or by seed, and bad rows refused or left out by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
import pandas as pd
import pytest
from s3_server import environment, s3_server

from engine.config import DataConfig
from engine.data.contract import RL_PROMPTS, SFT_PAIRS, check, check_disjoint
from engine.data.row_files import read_file_rows
from engine.data.sources import Splits, load_splits, source_digest
from engine.errors import DataError

COLUMNS = {"prompt": "input", "ground_truth": "target"}


def config(path: Path | str, **settings: Any) -> DataConfig:
    return DataConfig(source="files", path=str(path), columns=COLUMNS, **settings)


def write_csv(path: Path, numbers: range) -> Path:
    rows = [{"input": f"{n}+1?", "target": n + 1} for n in numbers]
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def asked(frame: pd.DataFrame) -> list[str]:
    return [prompt[-1]["content"] for prompt in frame["prompt"]]


def checked(splits: Splits) -> Splits:
    """The splits, as preprocessing checks and writes them."""
    for name, frame in splits.frames().items():
        check(frame, SFT_PAIRS if name.startswith("sft_") else RL_PROMPTS, name)
        frame.to_parquet(index=False)
    check_disjoint(splits.frames())
    return splits


def test_a_csv_of_two_columns_is_split_by_seed(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "sums.csv", range(50))
    mine = config(path, validation_size=4, test_size=30, train_size=8)
    splits = checked(load_splits(mine, 0))
    sizes = {name: len(frame) for name, frame in splits.frames().items()}
    assert sizes == {
        "sft_train": 36, "sft_validation": 4, "train": 8, "validation": 4, "test": 10,
    }  # fmt: skip
    assert splits.notes == (
        "test: 10 rows, taken from the training rows",
        "validation: 4 rows, taken from the training rows",
    )
    row = splits.train.iloc[0]
    number = int(asked(splits.train)[0].removesuffix("+1?"))
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(number + 1)}
    assert row["extra_info"] == {"index": number, "split": "train"}
    assert splits.sft_train.iloc[0]["response"] == str(number + 1)
    again, other = load_splits(mine, 0), load_splits(mine, 1)
    assert asked(again.train) == asked(splits.train) != asked(other.train)
    before = source_digest(mine, 0)
    write_csv(path, range(51))
    assert source_digest(mine, 0) != before == splits.source_digest


def test_splits_go_by_the_names_of_files_and_share_no_prompt(tmp_path: Path) -> None:
    write_csv(tmp_path / "train-00000-of-00002.csv", range(20))
    write_csv(tmp_path / "train-00001-of-00002.csv", range(15, 40))
    write_csv(tmp_path / "my_dev.csv", range(38, 44))
    write_csv(tmp_path / "test.csv", range(42, 50))
    (tmp_path / "dataset_infos.json").write_text("{}")
    splits = checked(load_splits(config(tmp_path, train_size=0, sft_size=0), 0))
    numbers = {
        n: {int(t.removesuffix("+1?")) for t in asked(f)} for n, f in splits.frames().items()
    }
    assert numbers["test"] == set(range(42, 50))
    assert numbers["validation"] == numbers["sft_validation"] == set(range(38, 42))
    assert numbers["train"] == numbers["sft_train"] == set(range(38))
    assert splits.notes == (
        "validation: 2 rows repeat a prompt and are left out",
        "train: 7 rows repeat a prompt and are left out",
    )
    fewer = load_splits(config(tmp_path, test_size=3, splits={"test": "dev"}), 0)
    assert len(fewer.test) == 3
    assert "test: 3 of 6 rows, by seed (data.test_size)" in fewer.notes
    with pytest.raises(DataError, match=r"data\.splits\.test='final' is in the name of no file"):
        load_splits(config(tmp_path, splits={"test": "final"}), 0)


def test_other_columns_stay_beside_the_row(tmp_path: Path) -> None:
    rows = [{"input": f"{n}?", "target": n, "level": n if n % 2 else "x"} for n in range(10)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = checked(load_splits(config(tmp_path / "d.jsonl"), 0))
    levels = {
        extra["level"] for frame in (splits.train, splits.test) for extra in frame["extra_info"]
    }
    assert levels <= {"x", *map(str, range(10))}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Rows 2, 3, 4, 6, 7 and 8 can't be used, each for another reason."""
    path = tmp_path / "bad.jsonl"
    lines: list[Any] = [
        {"prompt": "a", "ground_truth": "1"},
        {"prompt": 7, "ground_truth": "1"},
        {"prompt": "b"},
        {"prompt": "x" * 10_000_000, "ground_truth": "1"},
        {"prompt": "c", "ground_truth": "1"},
        {"prompt": "d\0", "ground_truth": "1"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text + '{"prompt": "\\ud83d", "ground_truth": "1"}\n{"prompt": \n')
    return path


def test_bad_rows_are_refused_or_left_out_by_number(bad: Path) -> None:
    message = (
        r"bad\.jsonl, row 2: column 'prompt' is 7; .*; 5 of 8 rows are bad \(rows 2, 4, 6, 7, 8\): "
        "correct them, or leave them out with data.bad_rows=drop$"
    )
    with pytest.raises(DataError, match=message):
        read_file_rows(str(bad), DataConfig(source="files"))
    found = read_file_rows(str(bad), DataConfig(source="files", bad_rows="drop"))
    assert found.numbers == [1, 5]
    assert found.bad.sentence().startswith(f"{bad}: 6 of 8 rows are bad and left out (rows 2, 4, ")


def test_a_ground_truth_is_needed_for_the_pipeline(bad: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    good = "".join(json.dumps({"prompt": f"{n}?", "ground_truth": n}) + "\n" for n in range(12))
    many.write_text(good + bad.read_text())
    mine = DataConfig(source="files", path=str(many), bad_rows="drop")
    splits = checked(load_splits(mine, 0))
    assert sum(len(f) for n, f in splits.frames().items() if not n.startswith("sft")) == 14
    assert "6 of 20 rows are bad and left out (rows 14, 15, 16, 18, 19, …)" in splits.notes[0]
    with pytest.raises(DataError, match=r"6 of 20 rows are bad"):
        load_splits(mine.model_copy(update={"bad_rows": "fail"}), 0)


def test_files_without_good_rows(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("prompt,ground_truth\n")
    with pytest.raises(DataError, match=r"empty\.csv has no rows"):
        load_splits(DataConfig(source="files", path=str(empty)), 0)
    with pytest.raises(DataError, match=r"no row of .*empty\.csv is left"):
        load_splits(DataConfig(source="files", path=str(empty), bad_rows="drop"), 0)
    few = write_csv(tmp_path / "few.csv", range(4))
    with pytest.raises(DataError, match=r"4 distinct training rows are too few to take a test"):
        load_splits(config(few), 0)
    with pytest.raises(DataError, match=r"data\.path is empty"):
        load_splits(config(""), 0)
    with pytest.raises(DataError, match="is no data file, and no folder"):
        load_splits(config(tmp_path / "gone"), 0)


def test_files_in_s3_are_read_as_local_ones(tmp_path: Path) -> None:
    local = write_csv(tmp_path / "sums.csv", range(30))
    with s3_server() as endpoint, environment(AWS_ENDPOINT_URL=endpoint):
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="sums")
        client.upload_file(str(local), "sums", "sets/train.csv")
        client.upload_file(
            str(write_csv(tmp_path / "t.csv", range(30, 36))), "sums", "sets/test.csv"
        )
        splits = checked(load_splits(config("s3://sums/sets", validation_size=4), 0))
        one = config("s3://sums/sets/train.csv")
        assert source_digest(one, 0) == source_digest(config(local), 0)
        with pytest.raises(DataError, match=r"s3://sums/sets/gone\.csv does not exist"):
            load_splits(config("s3://sums/sets/gone.csv"), 0)
    assert {name: len(frame) for name, frame in splits.frames().items()} == {
        "sft_train": 26, "sft_validation": 4, "train": 26, "validation": 4, "test": 6,
    }  # fmt: skip
