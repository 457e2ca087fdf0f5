import json
from pathlib import Path

import pandas as pd
import pytest

from engine.errors import DataError
from engine.storage.readers import list_files, read_bytes, read_rows


def test_jsonl_is_read_with_blank_lines_and_any_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes('{"a": 1}\r\n\n{"a": "\u2028é"}'.encode())
    assert read_rows(path) == [{"a": 1}, {"a": "\u2028é"}]


def test_parquet_gives_plain_lists_and_dicts(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "info": {"index": 3}}]
    pd.DataFrame(rows).to_parquet(tmp_path / "d.parquet")
    assert read_rows(tmp_path / "d.parquet") == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": \n', r"d\.jsonl, line 3: not valid JSON"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"d\.jsonl, line 2: not valid JSON"),
        (b'{"a": 1}\n[1, 2]\n', r"d\.jsonl, line 2: a JSON list, not an object"),
        (b"\n \n", r"d\.jsonl has no rows"),
        (b"", r"d\.jsonl has no rows"),
    ],
)
def test_malformed_jsonl_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(path)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        read_rows(tmp_path / "gone.jsonl")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"d\.parquet is not a readable Parquet"):
        read_rows(tmp_path / "d.parquet")
    pd.DataFrame({"a": []}).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet has no rows"):
        read_rows(tmp_path / "empty.parquet")
    (tmp_path / "d.csv").write_text("a\n1")
    with pytest.raises(DataError, match=r"d\.csv: can't read \.csv; give a \.jsonl file"):
        read_rows(tmp_path / "d.csv")
    with pytest.raises(DataError, match="is a folder"):
        read_bytes(tmp_path)
    with pytest.raises(DataError, match="can't read nope://"):
        read_bytes("nope://x/y")


def test_files_of_a_folder_are_listed_with_sizes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_text(json.dumps({}))
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert list_files(tmp_path) == dict.fromkeys(files, 2)
    assert list_files(tmp_path / "nowhere") == {}
