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
from engine.storage.json_rows import Row
from engine.storage.readers import list_files, open_file, parse_rows, read_bytes, stream_rows


def read_rows(uri: str | Path) -> list[Row]:
    """All rows of a file; the error of the first that can't be read."""
    with open_file(uri) as file:
        return parsed(file.read(), str(uri))


def parsed(data: bytes, name: str) -> list[Row]:
    rows = []
    for _, row in parse_rows(data, name):
        if isinstance(row, DataError):
            raise row
        rows.append(row)
    return rows


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
    with pytest.raises(DataError, match=r"d\.parquet, row 1: can't be read \(.*utf-8"):
        read_rows(path)
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(DataError, match=r"d\.parquet has several columns 'a'; rename"):
        read_rows(path)


def numbered(path: Path) -> list[tuple[int, object]]:
    """Rows by number; of a refused row the error's text."""
    return [(n, str(row) if isinstance(row, DataError) else row) for n, row in stream_rows(path)]


def test_rows_that_cannot_be_read_cost_themselves_alone(tmp_path: Path) -> None:
    table = tmp_path / "d.csv"
    table.write_bytes(b'\xef\xbb\xbfa,b\n1,"x, \n y"\n\n2\n3,\xff\n4,z\x00\n')
    rows = dict(numbered(table))
    assert rows[1] == {"a": "1", "b": "x, \n y"}
    assert rows[5] == {"a": "4", "b": "z\x00"}
    assert str(rows[3]).endswith(
        "d.csv, row 3: 1 cells below a header of 2; correct its quotes and commas"
    )
    assert "d.csv, row 4: not UTF-8" in str(rows[4])
    lines = tmp_path / "d.jsonl"
    lines.write_bytes(b'{"a": 1}\n\n{"a": \n[]\n{"a": 2}')
    found = dict(numbered(lines))
    assert (found[1], found[5]) == ({"a": 1}, {"a": 2})
    assert "line 3: not valid JSON" in str(found[3])
    assert "line 4: a JSON list" in str(found[4])
    binary = pa.array([b"x", b"\xff", b"y"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"a": binary}), tmp_path / "d.parquet")
    cells = dict(numbered(tmp_path / "d.parquet"))
    assert (cells[1], cells[3]) == ({"a": "x"}, {"a": "y"})
    assert "row 2: can't be read" in str(cells[2])


def test_the_same_rows_come_from_every_format(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "x\ty"}, {"a": None, "b": '"é"'}]
    frame = pd.DataFrame(rows)
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_csv(tmp_path / "d.tsv", index=False, sep="\t")
    frame.to_csv(tmp_path / "d.csv.gz", index=False)
    frame.to_parquet(tmp_path / "d.parquet")
    frame.to_json(tmp_path / "d.jsonl", orient="records", lines=True)
    frame.to_json(tmp_path / "d.ndjson.gz", orient="records", lines=True)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "e.json").write_text(json.dumps({"version": 1, "data": rows}))
    for path in tmp_path.iterdir():
        assert numbered(path) == [(1, rows[0]), (2, rows[1])], path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.csv", b"a,a\n1,2\n", "the header .* must name each column once"),
        ("d.csv", b"a,b\n", "has no rows"),
        ("d.csv", b"caf\xe9\n1\n", "its header is not UTF-8; write the file in that encoding"),
        ("d.json", b'{"a": 1}', "is no array of objects"),
        ("d.json", b"[{]", "not valid JSON"),
        ("d.json", b"[]", "has no rows"),
        ("d.jsonl.gz", b"{}", "is not a readable gzip file"),
        ("d.parquet.gz", b"PAR1", "can't read .gz"),
    ],
)
def test_what_is_wrong_with_a_whole_file_is_said(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name)


@given(st.sampled_from(["d.json", "d.csv"]), st.binary(max_size=60))
def test_any_bytes_of_other_formats_are_rows_or_a_refusal(name: str, content: bytes) -> None:
    with contextlib.suppress(DataError):
        json.dumps(parsed(content, name), ensure_ascii=False).encode()


@given(st.binary(max_size=60) | st.text('{}[]",:0 \\ud8x', max_size=60).map(str.encode))
def test_any_bytes_are_rows_or_a_refusal(content: bytes) -> None:
    with contextlib.suppress(DataError):
        json.dumps(parsed(content, "d.jsonl"), ensure_ascii=False).encode()


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl does not exist"):
        read_rows(tmp_path / "gone.jsonl")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"d\.parquet is not a readable Parquet"):
        read_rows(tmp_path / "d.parquet")
    pd.DataFrame({"a": []}).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet has no rows"):
        read_rows(tmp_path / "empty.parquet")
    (tmp_path / "d.txt").write_text("a\n1")
    with pytest.raises(DataError, match=r"d\.txt: can't read \.txt; give a \.jsonl, \.ndjson, "):
        read_rows(tmp_path / "d.txt")
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
