"""Rows of JSON, one object a line or in one array, that Parquet and UTF-8 can hold, too."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

from engine.errors import DataError

Row: TypeAlias = dict[str, Any]
Numbered: TypeAlias = tuple[int, Row | DataError]
"""A row with its number in the file (from 1; of JSONL the line), or why there is none."""

DEEPEST = 64  # lists and objects in each other; JSON, Parquet and pickle take several times that
LONGEST_LINE = 64 << 20  # bytes; a longer line is passed over in pieces
LARGEST_ARRAY = 1 << 30  # bytes; a JSON array has to be held in memory

_TOO_DEEP = f"has lists or objects nested more than {DEEPEST} levels deep; flatten them"
_MAYBE_LONE = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of a surrogate, in a pair or alone


def json_lines(file: BinaryIO, name: str) -> Iterator[Numbered]:
    """The rows of a file with one JSON object a line; blank lines are none."""
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        where = f"{name}, line {number}"
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            yield number, DataError(f"{where}: longer than {LONGEST_LINE >> 20} MiB; shorten it")
        elif line.strip():
            deep = line.count(b"[") + line.count(b"{") > DEEPEST
            try:
                lone = bool(_MAYBE_LONE.search(line))
                yield number, _checked(_loads(line, where), where, deep, lone)
            except DataError as error:
                yield number, error


def json_array(file: BinaryIO, name: str) -> Iterator[Numbered]:
    """The objects of a JSON array, or of the only array in an object: `{"data": [{…}, …]}`."""
    data = file.read(LARGEST_ARRAY + 1)
    if len(data) > LARGEST_ARRAY:
        raise DataError(
            f"{name} is over {LARGEST_ARRAY >> 30} GiB, too much for one JSON array; write .jsonl"
        )
    rows = _loads(data, name)
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else None
    if not isinstance(rows, list):
        raise DataError(f"{name} is no array of objects, and no object with one; write .jsonl")
    for number, row in enumerate(rows, start=1):
        where = f"{name}, row {number}"
        try:
            yield number, _checked(row, where, deep=True, lone=True)
        except DataError as error:
            yield number, error


def _loads(data: bytes, where: str) -> object:
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); each row must be one object") from None
    except RecursionError:
        raise DataError(f"{where}: {_TOO_DEEP}") from None
    except ValueError:
        column = _column_with_long_number(text)
        raise DataError(
            f"{where}: column {column!r} has a whole number of more than "
            f"{sys.get_int_max_str_digits()} digits; write it as text"
        ) from None


def _checked(row: object, where: str, deep: bool, lone: bool) -> Row:
    """The row, looked through where it may be too `deep` or hold a `lone` surrogate."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}, not an object with columns")
    for column, value in row.items() if deep or lone else ():
        if deep and _is_too_deep(value):
            raise DataError(f"{where}: column {column!r} {_TOO_DEEP}")
        if lone and _has_lone_surrogate({column: value}):
            raise DataError(
                f"{where}: column {column!r} has half of a UTF-16 surrogate pair, such as "
                '"\\ud83d", which is no character; write the pair, or leave it out'
            )
    return row


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [v for v in level if isinstance(v, list | dict)]
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return any(isinstance(v, list | dict) for v in level)


def is_utf8(text: str) -> bool:
    """Tell whether a text has no half of a surrogate pair, which UTF-8 can't hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has_lone_surrogate(value: object) -> bool:
    return not is_utf8(json.dumps(value, ensure_ascii=False))


def _column_with_long_number(text: str) -> str:
    limit, mark = sys.get_int_max_str_digits(), "\ud800"  # which no digits contain
    row = json.loads(text, parse_int=lambda digits: mark if len(digits) > limit else digits)
    columns = row.items() if isinstance(row, dict) else []
    return next((column for column, value in columns if _has_lone_surrogate(value)), "")
