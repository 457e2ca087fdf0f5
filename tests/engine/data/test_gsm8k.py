import json
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import pandas as pd
import pytest
from s3_server import environment, s3_server

from engine.config import DataConfig
from engine.data.math_problems import GSM8K
from engine.data.rows import prompt_text
from engine.data.sources import Splits, load_splits, source_digest
from engine.errors import DataError, StorageError

Row = dict[str, str]


def problem(i: int) -> Row:
    answer = f"Add: {i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1:,}"
    return {"question": f"What is {i} plus 1?", "answer": answer}


TRAIN = [problem(i) for i in range(990, 1040)]
TEST = [problem(i) for i in range(20)]


def jsonl(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder: Path, train: list[Row] = TRAIN, test: list[Row] = TEST) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_bytes(jsonl(train))
    (folder / "test.jsonl").write_bytes(jsonl(test))
    return folder


def config(path: Path | str, **sizes: int) -> DataConfig:
    return DataConfig.model_validate({"source": "gsm8k", "path": str(path), **sizes})


def questions(frame: pd.DataFrame) -> set[str]:
    return {prompt_text(prompt) for prompt in frame["prompt"]}


def assert_same(a: Splits, b: Splits) -> None:
    for name, frame in a.frames().items():
        pd.testing.assert_frame_equal(frame, b.frames()[name])


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write(tmp_path / "gsm8k")


def test_sft_and_rl_train_on_the_same_rows_and_validation_is_carved_out(local: Path) -> None:
    splits = load_splits(config(local), seed=0)
    sizes = [len(frame) for frame in splits.frames().values()]
    assert sizes == [40, 10, 40, 10, 20]
    assert questions(splits.train) == questions(splits.sft_train)
    assert questions(splits.validation) == questions(splits.sft_validation)
    assert questions(splits.train) | questions(splits.validation) == {r["question"] for r in TRAIN}
    assert questions(splits.test) == {r["question"] for r in TEST}


def test_rows_keep_answer_and_ground_truth_together(local: Path) -> None:
    splits = load_splits(config(local), seed=0)
    by_question = {r["question"]: r for r in TRAIN}
    pairs = zip(splits.train.to_dict("records"), splits.sft_train.to_dict("records"), strict=True)
    for rl, sft in pairs:
        row = by_question[prompt_text(rl["prompt"])]
        assert sft["response"] == row["answer"]
        truth = rl["reward_model"]["ground_truth"]
        assert f"#### {int(truth):,}" == row["answer"].splitlines()[-1]
        assert TRAIN[rl["extra_info"]["index"]] == row
        assert rl["data_source"] == "gsm8k"


def test_sizes_are_limits_and_the_seed_chooses_the_rows(local: Path) -> None:
    limits = {"sft_size": 7, "train_size": 5, "validation_size": 3, "test_size": 4}
    splits = load_splits(config(local, **limits), seed=0)
    assert [len(frame) for frame in splits.frames().values()] == [7, 3, 5, 3, 4]
    assert_same(splits, load_splits(config(local, **limits), seed=0))
    other = load_splits(config(local, **limits), seed=1)
    assert questions(other.validation) != questions(splits.validation)


def test_repeated_questions_cannot_reach_both_train_and_validation(tmp_path: Path) -> None:
    repeated = [{**r, "question": r["question"].upper()} for r in TRAIN]
    splits = load_splits(config(write(tmp_path, train=TRAIN + repeated)), seed=0)
    assert len(splits.train) + len(splits.validation) == len(TRAIN)


def test_the_digest_follows_the_bytes(local: Path) -> None:
    before = source_digest(config(local), 0)
    assert before == load_splits(config(local), 0).source_digest
    assert before == source_digest(config(write(local.parent / "copy")), 1)
    (local / "test.jsonl").write_bytes(jsonl(TEST[:-1]))
    assert source_digest(config(local), 0) != before


def test_the_digest_tells_which_split_a_shard_belongs_to(tmp_path: Path) -> None:
    """The same three files in the same order; the middle one is training data, or it is not."""
    shards = [pd.DataFrame(rows) for rows in (TRAIN[:30], TRAIN[30:], TEST)]
    names = {
        "one": ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"),
        "other": ("train-00000-of-00001", "test-00000-of-00002", "test-00001-of-00002"),
    }
    for place, files in names.items():
        (tmp_path / place).mkdir()
        for name, shard in zip(files, shards, strict=True):
            shard.to_parquet(tmp_path / place / f"{name}.parquet")
    one, other = (source_digest(config(tmp_path / place), 0) for place in names)
    assert one != other


@pytest.mark.parametrize("folder", ["", "main", "data"])
def test_parquet_shards_in_the_hubs_layout(tmp_path: Path, local: Path, folder: str) -> None:
    hub = tmp_path / "hub"
    (hub / folder).mkdir(parents=True)
    pd.DataFrame(TRAIN[:30]).to_parquet(hub / folder / "train-00000-of-00002.parquet")
    pd.DataFrame(TRAIN[30:]).to_parquet(hub / folder / "train-00001-of-00002.parquet")
    pd.DataFrame(TEST).to_parquet(hub / folder / "test-00000-of-00001.parquet")
    read, expected = load_splits(config(hub), 0), load_splits(config(local), 0)
    for name, frame in expected.frames().items():
        assert read.frames()[name]["prompt"].tolist() == frame["prompt"].tolist()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"question": "Why?", "answer": "No mark"}, r"train\.jsonl, row 51: .* there is no '####'"),
        ({"question": " ", "answer": "#### 5"}, r"train\.jsonl, row 51: column 'prompt' is ' '"),
        ({"text": "Why?"}, r"train\.jsonl, row 51: .*'question' is undefined.* are \['text'\]"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, broken: Row, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_splits(config(write(tmp_path, train=[*TRAIN, broken])), 0)


def test_wrong_paths_are_told_apart(tmp_path: Path, local: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere' is no data file, and no folder with some"):
        load_splits(config(tmp_path / "nowhere"), 0)
    (local / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no training split among test\.jsonl"):
        load_splits(config(local), 0)
    with pytest.raises(DataError, match="4 distinct training rows can't give"):
        load_splits(config(write(tmp_path / "few", train=TRAIN[:4])), 0)


@pytest.fixture
def s3() -> Iterator[str]:
    """An S3 server of our own; yields its address."""
    with s3_server() as endpoint, environment(AWS_ENDPOINT_URL=endpoint):
        yield endpoint


def test_an_s3_prefix_gives_what_the_folder_gives(s3: str, local: Path) -> None:
    client = boto3.client("s3", endpoint_url=s3)
    client.create_bucket(Bucket="data")
    for split, rows in (("train", TRAIN), ("test", TEST)):
        client.put_object(Bucket="data", Key=f"sets/gsm8k/{split}.jsonl", Body=jsonl(rows))
    splits = load_splits(config("s3://data/sets/gsm8k/"), 0)
    expected = load_splits(config(local), 0)
    assert_same(splits, expected)
    assert splits.source_digest == expected.source_digest
    with pytest.raises(DataError, match=r"s3://data/elsewhere' is no data file, and no folder"):
        load_splits(config("s3://data/elsewhere"), 0)


def test_an_s3_server_that_is_down_is_reported_at_once(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"can't read s3://data/gsm8k: .*AWS_ENDPOINT_URL"):
        load_splits(config("s3://data/gsm8k"), 0)
    assert time.monotonic() - start < 15


def test_a_hub_id_is_read_in_the_hubs_form() -> None:
    def path(given: str) -> str:
        return GSM8K().settings(config(given)).path

    assert path("openai/gsm8k") == path("") == "hf://openai/gsm8k:main"
    assert path("team/gsm8k") == "team/gsm8k"
