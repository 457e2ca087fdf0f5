"""The source `files`: splits by name, columns and templates, datasets of the hub."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pandas as pd
import pytest
from s3_server import environment, s3_server

from engine.config import DataConfig, RowsConfig
from engine.data.contract import RL_PROMPTS, SFT_PAIRS, check, check_disjoint
from engine.data.row_files import (
    LONGEST_TEXT,
    HubDataset,
    RowMapper,
    address_digest,
    hub_commit,
    parse_address,
    read_file_rows,
)
from engine.data.sources import Splits, load_splits, source_digest
from engine.errors import ConfigError, DataError

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
    assert found.notes[0].startswith(f"{bad}: 6 of 8 rows are bad and left out (rows 2, 4, ")


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
    with pytest.raises(DataError, match=r"4 distinct training rows can't give a test"):
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


def test_an_empty_cell_is_no_ground_truth_and_hides_no_later_row(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    good = "".join(f"{n}+1?,{n + 1}\n" for n in range(9))
    path.write_text(f"input,target\n7+1?,\n{good}")
    with pytest.raises(DataError, match=r"sums\.csv, row 1: there is no ground truth"):
        load_splits(config(path), 0)
    splits = load_splits(config(path, bad_rows="drop"), 0)
    assert sum(len(frame) for name, frame in splits.frames().items() if "sft" not in name) == 9


def mapped(raw: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return RowMapper(RowsConfig.model_validate(settings))(raw, "d.csv, row 2")


def test_columns_are_named_nested_and_templated() -> None:
    row = mapped(
        {"q": "1+1", "info": {"answer": {"value": "#### 2"}}, "prompt": "not this", "level": 3},
        columns={"prompt": "q", "ground_truth": "info.answer.value"},
        templates={
            "prompt": "{{ prompt }} = {{ '?' * level }}",
            "ground_truth": "{{ ground_truth.split('####')[1] | trim }}",
        },
        system_prompt="Be brief.",
        data_source="sums",
    )
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1 = ???"},
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (row["data_source"], row["level"], row["info"]) == (
        "sums",
        3,
        {"answer": {"value": "#### 2"}},
    )
    assert "q" not in row


def test_null_is_nothing_in_a_template() -> None:
    row = mapped({"q": "1+1?", "hint": None}, templates={"prompt": "{{ q }}{{ hint }}"})
    assert row["prompt"] == [{"role": "user", "content": "1+1?"}]


def test_rows_of_verl_pass_as_they_are() -> None:
    verl = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    assert mapped(verl, system_prompt="Not this.", data_source="nor this") == verl


@pytest.mark.parametrize(
    ("raw", "settings", "message"),
    [
        ({"a": "x"}, {"columns": {"prompt": "q"}}, r"no column 'q' for data.columns.prompt; .*'a'"),
        ({"a": {"b": 1}}, {"columns": {"prompt": "a.b.c"}}, r"no column 'a\.b\.c'"),
        ({"question": "x"}, {}, r"no column 'prompt'; name one of \['question'\]"),
        ({"prompt": "a\0b"}, {}, "'prompt' has a NUL character at 1"),
        ({"prompt": "a", "ground_truth": "\0"}, {}, "'ground_truth' has a NUL"),
        ({"prompt": "x" * 10_000_000}, {}, "'prompt' has 10,000,000 characters, more than 4,000"),
        ({"prompt": [{"role": "user", "content": "x\0"}]}, {}, "'prompt' has a NUL"),
        ({"prompt": 7}, {}, "column 'prompt' is 7"),
        ({"q": "a"}, {"templates": {"prompt": "{{ p }}"}}, "UndefinedError: 'p' is undefined"),
        ({"q": None}, {"templates": {"prompt": "{{ q.split() }}"}}, "can't be rendered"),
        (
            {"q": "a"},
            {"templates": {"prompt": "{{ q.__class__.__mro__ }}"}},
            "SecurityError",
        ),
    ],
)
def test_a_row_without_a_form_is_refused(
    raw: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"^d\.csv, row 2: .*{message}") as caught:
        mapped(raw, **settings)
    assert len(str(caught.value)) < 400


def test_text_in_the_data_is_no_template_and_long_text_is_read() -> None:
    text = "{{ 7 * 7 }}" + "x" * (LONGEST_TEXT - 11)
    row = mapped({"q": text}, templates={"prompt": "{{ q }}"})
    assert row["prompt"][0]["content"] == text


def test_a_wrong_template_is_refused_before_any_row() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.templates\.prompt is not a Jinja2 template \(line 1"
    ):
        RowMapper(RowsConfig(templates={"prompt": "{{ q"}))


COMMIT = hashlib.sha1(b"commit").hexdigest()


def test_addresses_have_four_parts() -> None:
    assert parse_address("hf://openai/gsm8k") == HubDataset("openai/gsm8k", "", "", "")
    assert parse_address("hf://a/b@v1.0:main:train[:10%]") == HubDataset(
        "a/b", "v1.0", "main", "train[:10%]"
    )
    assert parse_address("hf://squad::validation") == HubDataset("squad", "", "", "validation")
    for wrong in ("hf://", "hf://a/b/c", "hf://a b:x"):
        with pytest.raises(DataError, match=r"write hf://ID\[@REVISION\]"):
            parse_address(wrong)


def test_a_commit_needs_no_network_and_tells_data_apart() -> None:
    assert hub_commit(parse_address(f"hf://a/b@{COMMIT}")) == COMMIT
    digests = {address_digest(f"hf://a/b@{COMMIT}:{rest}") for rest in ("x:train", "x:test", "y:x")}
    assert len(digests) == 3


def parquet(*numbers: int) -> bytes:
    file = io.BytesIO()
    pd.DataFrame({"q": [f"{n}+1?" for n in numbers], "a": [n + 1 for n in numbers]}).to_parquet(
        file
    )
    return file.getvalue()


README = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train.parquet
- config_name: main
  data_files:
  - split: train
    path: main/train-*.parquet
  - split: dev
    path: main/dev.parquet
---
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as `datasets` asks for, for one dataset."""

    files: ClassVar[dict[str, bytes]] = {
        "README.md": README,
        "small/train.parquet": parquet(*range(5)),
        "main/train-0.parquet": parquet(*range(30)),
        "main/train-1.parquet": parquet(*range(30, 40)),
        "main/dev.parquet": parquet(*range(50, 58)),
    }

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(body)["paths"] if body.startswith("{") else []
        self.reply(200, json.dumps([self.entry(name) for name in wanted if name in self.files]))

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        head, _, name = path.partition("/resolve/")
        name = name.partition("/")[2]
        if path.startswith("/api/datasets/team/sums/tree/"):
            below = path.partition("/tree/")[2].partition("/")[2]
            self.reply(200, json.dumps(self.tree(below, "recursive=True" in self.path)))
        elif path.startswith("/api/datasets/team/sums"):
            siblings = [{"rfilename": file} for file in self.files]
            info = {"id": "team/sums", "sha": COMMIT, "siblings": siblings, "tags": []}
            self.reply(200, json.dumps({**info, "private": False, "gated": False}))
        elif head == "/datasets/team/sums" and name in self.files:
            self.reply(200, self.files[name])
        else:
            self.reply(404, b"")

    def entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def tree(self, below: str, deep: bool) -> list[dict[str, Any]]:
        inside = [n for n in self.files if not below or n.startswith(f"{below}/")]
        if deep:
            return [self.entry(name) for name in inside]
        start = len(below) + 1 if below else 0
        folders = {n[:start] + n[start:].split("/")[0] for n in inside if "/" in n[start:]}
        entries = [{"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in folders]
        return entries + [self.entry(n) for n in inside if "/" not in n[start:]]

    def reply(self, status: int, body: str | bytes) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output quiet."""


LOAD = """
import sys
from engine.config import DataConfig
from engine.data.sources import load_splits
from engine.errors import DataError
for path in sys.argv[1:]:
    config = DataConfig(
        source="files", path=path, columns={"prompt": "q", "ground_truth": "a"}, test_size=4
    )
    try:
        splits = load_splits(config, 0)
        print({name: len(frame) for name, frame in splits.frames().items()})
    except DataError as error:
        print("DataError", error)
"""


def loaded(endpoint: str, cache: Path, *paths: str) -> list[str]:
    """Run in a process of its own: the hub's address is read when its client is imported."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", LOAD, *paths]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return run.stdout.strip().splitlines()


@pytest.mark.slow
def test_subsets_and_splits_come_from_the_hub_and_then_from_the_cache(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    pinned = f"hf://team/sums@{COMMIT}:main:train"
    try:
        found = loaded(
            endpoint,
            tmp_path / "cache",
            "team/sums:main",
            "hf://team/sums:small:train",
            pinned,
            "hf://team/nothing:main",
            "hf://team/sums:main:final",
        )
    finally:
        server.shutdown()
        server.server_close()
    sizes = {"sft_train": 36, "sft_validation": 8, "train": 36, "validation": 8, "test": 4}
    assert found[0] == str(sizes)
    assert found[1] == str(dict.fromkeys(sizes, 1) | {"sft_train": 3, "train": 3})
    assert found[2] == str(sizes | {"sft_train": 28, "train": 28})
    assert found[3].startswith("DataError the Hugging Face hub gives no dataset 'team/nothing'")
    assert found[4].startswith("DataError the dataset 'team/sums' of the hub can't be read (")
    again = loaded(endpoint, tmp_path / "cache", pinned, "team/sums:main", "team/others:main")
    assert again[:2] == [found[2], found[0]]
    assert again[2].startswith("DataError the Hugging Face hub gives no dataset 'team/others'")
