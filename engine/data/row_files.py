"""All rows of a few files in memory, in canonical form, with what was left out of them.

Streams that need not fit into memory are in `bad_rows`; what a canonical row is, in `rl_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import RowsConfig
from engine.data.bad_rows import BadRows, mapped_rows
from engine.data.hub_dataset import HUB
from engine.data.rl_rows import missing_truths, same_columns
from engine.data.rows import RULE, TRUTH
from engine.errors import DataError
from engine.storage.filesystem import as_path, is_remote
from engine.storage.json_rows import Row
from engine.storage.readers import is_data_file, list_files


@dataclass(frozen=True, slots=True)
class FileRows:
    """The good rows of a file, and what became of the others."""

    rows: list[Row]
    numbers: list[int]  # of the rows in the file, from 1
    bad: BadRows


def read_rl_rows(path: str | Path) -> list[Row]:
    """Read the rows of a file in canonical form; DataError names the first row that has none."""
    return read_file_rows(str(path), RowsConfig()).rows


def read_file_rows(address: str, config: RowsConfig) -> FileRows:
    """Read all rows of a file, an s3:// object or a dataset of the hub in canonical form.

    All get the same columns; one that only some rows have is None in the others. Where only some
    have a ground truth, the others are bad. Raises DataError as `mapped_rows` does, and for bad
    rows where `config.bad_rows` is "fail", with their numbers and the reason of the first.
    """
    bad = BadRows(address, config.bad_rows)
    numbered = list(mapped_rows(address, config, bad))
    bad.check()
    missing = {number for number, row in numbered if row[RULE][TRUTH] is None}
    if missing and len(missing) < len(numbered):
        error = missing_truths(address, sorted(missing), bad.total)
        if config.bad_rows == "fail":
            raise error
        for number in sorted(missing):
            bad.add(number, error)
        numbered = [(number, row) for number, row in numbered if number not in missing]
    rows = same_columns([row for _, row in numbered])
    return FileRows(rows, [number for number, _ in numbered], bad)


def data_files(address: str) -> list[str]:
    """The files that an address stands for: itself, or of a folder the data files right in it.

    Raises DataError for a folder without any.
    """
    if address.startswith(HUB) or is_data_file(address):
        return [address]
    if not is_remote(address) and not as_path(address).is_dir():
        return [address]
    files = sorted(uri for uri in list_files(address) if is_data_file(uri))
    if not files:
        raise DataError(f"{address} holds no data files; give a file, or a folder with some")
    return files
