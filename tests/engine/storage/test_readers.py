import contextlib
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataError
from engine.storage.readers import list_files, parse_rows, read_bytes, read_rows


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
        (b'{}\n{"a": ' + b"[" * 100_000, r"d\.jsonl, line 2: has lists or objects nested more"),
        (
            b'{"b": [1], "a": ' + b"[" * 65 + b"]" * 65 + b"}",
            r"line 1: column 'a' has lists or objects nested more than 64 levels deep; flatten",
        ),
        (
            b'{"b": 1, "a": {"x": [' + b"7" * 5000 + b"]}}",
            r"line 1: column 'a' has a whole number of more than 4300 digits; write it as text",
        ),
        (b'{"b": "\\ud83d\\ude00", "a": ["\\ud83d"]}', r"line 1: column 'a' has half of a UTF-16"),
        (b'{"\\uDE00": 1}', r"line 1: column '\\ude00' has half of a UTF-16 surrogate pair"),
        (b'{"a": "\xed\xa0\x80"}', r"d\.jsonl, line 1: not valid JSON"),
        (b"\n \n", r"d\.jsonl has no rows"),
        (b"", r"d\.jsonl has no rows"),
    ],
)
def test_malformed_jsonl_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(path)


def test_pairs_of_surrogates_and_moderate_depth_are_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    deep = "[" * 64 + "]" * 64
    path.write_text(f'{{"a": "\\ud83d\\ude00", "b": {deep}, "c": {"7" * 4000}}}')
    (row,) = read_rows(path)
    assert row["a"] == "\U0001f600"
    assert json.dumps(row["b"]) == deep
    assert str(row["c"]) == "7" * 4000


def test_parquet_that_python_can_not_hold_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    text = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"a": text}), path)
    with pytest.raises(DataError, match=r"d\.parquet is not a readable Parquet file \(.*utf-8"):
        read_rows(path)
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(
        DataError, match=r"d\.parquet is not .* \(Multiple matches for .*\); write it again$"
    ):
        read_rows(path)


@given(st.binary(max_size=60) | st.text('{}[]",:0 \\ud8x', max_size=60).map(str.encode))
def test_any_bytes_are_rows_or_a_refusal(content: bytes) -> None:
    with contextlib.suppress(DataError):
        json.dumps(parse_rows(content, "d.jsonl"), ensure_ascii=False).encode()


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
