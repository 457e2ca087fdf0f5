"""Incremental data in dated folders: find the files that are new at a time, and their new rows.

    new_files = find_new_files("s3://bucket/problems", kickoff, ledger, lookback_days=30)
    new_rows = find_new_rows(dataset, new_files, config.data)

A prefix has one folder per day, `2026-11-20/` or `dt=2026-11-20/`, with `.parquet` and `.jsonl`
files at any depth below. A file is new at a kick-off if its day is not after the kick-off's, it was
last written at or before it, and its content was not ingested before: the same kick-off finds the
same files whenever it runs.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from engine.config import RowsConfig
from engine.data.contract import truth_of
from engine.data.row_files import MappedRows, RowMapper
from engine.data.rows import RULE, canonical_row, normalise, prompt_text
from engine.data.sources import evaluation_files
from engine.errors import ConfigError, DataError
from engine.storage.filesystem import Entry, Files, as_path, is_remote, translated
from engine.storage.json_rows import Row
from engine.storage.readers import read_bytes

_DAY = re.compile(r"(?:[A-Za-z_]\w*=)?(\d{4}-\d{2}-\d{2})")
_UNFINISHED = (".", "_")  # first letters of files that are still being written
_SUFFIXES = (".jsonl", ".parquet")  # others in those folders are not data


class DataFile(BaseModel):
    """A data file at the time of its ingestion."""

    model_config = ConfigDict(frozen=True)

    path: str  # below the prefix, e.g. "2026-11-20/batch-3.parquet"
    sha256: str  # hex
    size: int  # bytes
    written: str  # UTC, e.g. "2026-11-20T21:04:11+00:00"


@dataclass(frozen=True, slots=True)
class NewFiles:
    """The data files that are new at a kick-off."""

    prefix: str  # e.g. "s3://bucket/problems"
    files: tuple[DataFile, ...] = ()  # by path
    late: int = 0  # those of them whose day is before that of a file that was already ingested
    known: int = 0  # files in the lookback that were ingested before, under this name or another
    waiting: int = field(default=0, compare=False)  # files written since: for a later kick-off


def find_new_files(
    prefix: str, kickoff: datetime, ledger: Sequence[DataFile], lookback_days: int
) -> NewFiles:
    """Find the files that are new at `kickoff` (UTC where it has no zone).

    `ledger` has all files that were ingested before, which are known by their content. Raises
    DataError when something can't be read, StorageError when the store doesn't answer, ConfigError
    for an empty prefix.
    """
    if not prefix:
        raise ConfigError("retrain.path is empty; give the folder or s3:// prefix of new data")
    kickoff = kickoff if kickoff.tzinfo else kickoff.replace(tzinfo=UTC)
    by_path = {file.path: file for file in ledger}
    contents = {file.sha256 for file in ledger}
    newest = max((day for path in by_path if (day := _day_of(path))), default=date.min)
    today = kickoff.astimezone(UTC).date()
    known, late, waiting, new = 0, 0, 0, []
    for path, day, uri, entry in _dated_files(prefix):
        written_at, size = _written(entry), int(entry["size"] or 0)
        if written_at > kickoff:
            waiting += 1
            continue
        if not today - timedelta(days=lookback_days) <= day <= today:
            continue
        written = written_at.astimezone(UTC).isoformat()
        data_file = by_path.get(path)
        if data_file is None or (data_file.size, data_file.written) != (size, written):
            digest = hashlib.sha256(read_bytes(uri)).hexdigest()
            data_file = DataFile(path=path, sha256=digest, size=size, written=written)
        if data_file.sha256 in contents:
            known += 1
            continue
        contents.add(data_file.sha256)
        new.append(data_file)
        late += day < newest
    return NewFiles(prefix.rstrip("/"), tuple(new), late, known, waiting)


def _dated_files(prefix: str) -> Iterator[tuple[str, date, str, Entry]]:
    """Path, day, URI and entry of all finished data files in dated folders, by path."""
    if not is_remote(prefix) and not as_path(prefix).is_dir():
        raise DataError(f"retrain.path={prefix!r} does not exist; give the folder of new data")
    with translated(prefix, DataError):
        files = Files(prefix)
        entries = files.find()
    for path, entry in sorted(entries.items()):
        day, file = _day_of(path), path.rsplit("/", 1)[-1]
        if day and not file.startswith(_UNFINISHED) and file.lower().endswith(_SUFFIXES):
            yield path, day, files.uri_of(entry["name"]), entry


def _day_of(path: str) -> date | None:
    """The day in the name of a path's first folder; None outside dated folders."""
    folder, separator, _ = path.partition("/")
    match = _DAY.fullmatch(folder)
    try:
        return date.fromisoformat(match[1]) if separator and match else None
    except ValueError:
        return None


def _written(entry: Entry) -> datetime:
    """When a file was last written: `mtime` on disks, `LastModified` in object stores."""
    when = entry.get("LastModified") or entry.get("mtime") or entry.get("updated")
    if isinstance(when, datetime):
        return when if when.tzinfo else when.replace(tzinfo=UTC)
    if isinstance(when, int | float):
        return datetime.fromtimestamp(when, UTC)
    raise DataError(
        f"{entry.get('name')}: the store has no time of its last write; use a folder or s3://"
    )


def read_new_files(new_files: NewFiles, config: RowsConfig) -> tuple[list[Row], list[str]]:
    """Read the rows of all new files in canonical form, in the order of their paths.

    Prompts get `data.system_prompt`, as those of the champion's dataset have. Returns notes on what
    `data.bad_rows=drop` leaves out, too. Raises DataError for a file that has changed since it was
    found, and for an unusable row.
    """
    rows, notes, mapper = list[Row](), list[str](), RowMapper(config)

    def canonical(raw: Row, where: str) -> Row:
        row = canonical_row(raw, where)
        return row | {"prompt": mapper.with_system(row["prompt"])}

    for file in new_files.files:
        uri = f"{new_files.prefix}/{file.path}"
        data = read_bytes(uri)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise DataError(
                f"{uri} was written again while this run ingested it; start the run again"
            )
        mapped = MappedRows(uri, config, need_truth=True, mapper=canonical, content=data)
        rows += [row for _, row in mapped]
        notes += mapped.notes()
    return rows, notes


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of new files that a retraining run may train on."""

    rows: pd.DataFrame  # each prompt once, in the order of arrival, with all columns of the files
    total: int  # good rows in the new files, e.g. 70
    notes: Sequence[str] = ()  # on what was left out as bad

    @property
    def dropped(self) -> int:
        """Number of rows that are repeated, held out, or trained on already."""
        return self.total - len(self.rows)


def find_new_rows(dataset: Path, new_files: NewFiles, config: RowsConfig) -> NewRows:
    """Read the new files and keep the rows that are new to a dataset's folder."""
    rows, notes = read_new_files(new_files, config)
    arrived = pd.DataFrame(rows)
    if arrived.empty:
        return NewRows(arrived, 0, notes)
    held_out = [dataset / f"{name}.parquet" for name in ("validation", "sft_validation")]
    held_out += evaluation_files(dataset).values()
    seen = {key for path in held_out for key in _prompt_keys(pd.read_parquet(path))}
    train = pd.read_parquet(dataset / "train.parquet")
    trained = set(zip(_prompt_keys(train), map(truth_of, train[RULE]), strict=True))
    is_new = []
    for key, rule in zip(_prompt_keys(arrived), arrived[RULE], strict=True):
        is_new.append(key not in seen and (key, truth_of(rule)) not in trained)
        if is_new[-1]:
            seen.add(key)
    return NewRows(arrived[is_new].reset_index(drop=True), len(arrived), notes)


def sample_replay(old: pd.DataFrame, new: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Sample rows of `old` so that they make up `share` of the new training set.

    Each prompt at most once, and none that is in `new`; fewer rows where `old` has too few.
    """
    keys = pd.Series(_prompt_keys(old), index=old.index, dtype=object)
    is_candidate = ~keys.duplicated() & ~keys.isin(_prompt_keys(new))
    candidates = old[is_candidate].reset_index(drop=True)
    count = min(len(candidates), round(len(new) * share / (1 - share)))
    return candidates.sample(n=count, random_state=seed)


def _prompt_keys(frame: pd.DataFrame) -> list[str]:
    return [normalise(prompt_text(prompt)) for prompt in frame["prompt"]]
