"""Data that arrives in dated folders: which files are new at a moment, and their rows.

    window = open_window("s3://bucket/problems", kickoff, taken=ledger, lookback_days=30)
    rows = read_window(window)

A dated prefix holds a folder a day, `2026-11-20/` or `dt=2026-11-20/`, with `.parquet` and `.jsonl`
files of any depth below. A file belongs to the window of a kick-off when its day is not after the
kick-off's, it was last written at or before it, and its content was not taken before. So the
same kick-off finds the same files whenever it runs, and files that arrive late in a past day's
folder are taken once, by the next window.

`engine.data.contract` checks the rows; `tasks.retraining_trigger` keeps the ledger.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine.errors import ConfigError, DataError
from engine.storage.filesystem import Entry, Files, as_path, is_remote, translated
from engine.storage.readers import SUFFIXES, parse_rows, read_bytes

_DAY = re.compile(r"(?:[A-Za-z_]\w*=)?(\d{4}-\d{2}-\d{2})")
_UNFINISHED = (".", "_")  # first letters of files that are still being written


class Arrival(BaseModel):
    """A file as it was taken."""

    model_config = ConfigDict(frozen=True)

    path: str  # below the prefix, e.g. "2026-11-20/batch-3.parquet"
    sha256: str  # hex
    size: int  # bytes
    written: str  # UTC, e.g. "2026-11-20T21:04:11+00:00"


@dataclass(frozen=True, slots=True)
class Window:
    """What is new at a kick-off."""

    prefix: str  # e.g. "s3://bucket/problems"
    new: tuple[Arrival, ...] = ()  # by path
    late: int = 0  # those of them whose day was over when files of a later day were taken
    known: int = 0  # files of the window that were taken before, by name or by content


@dataclass(frozen=True, slots=True)
class _Listed:
    path: str
    uri: str
    day: date
    size: int
    written: datetime


def open_window(
    prefix: str, kickoff: datetime, taken: Sequence[Arrival], lookback_days: int
) -> Window:
    """Find the files that are new at `kickoff` (UTC where it has no zone).

    taken: the ledger, all files that were taken before. A file that was written again with other
    content is new; the same content under another name is not.

    Raises DataError when the prefix can't be listed or a file can't be read, StorageError when the
    store doesn't answer, ConfigError for an empty prefix.
    """
    if not prefix:
        raise ConfigError("retrain.path is empty; give the folder or s3:// prefix of new data")
    kickoff = kickoff if kickoff.tzinfo else kickoff.replace(tzinfo=UTC)
    by_path = {arrival.path: arrival for arrival in taken}
    contents = {arrival.sha256 for arrival in taken}
    newest = max((day for path in by_path if (day := _day_of(path))), default=date.min)
    known, late, new = 0, 0, []
    for file in _listed(prefix):
        if file.written > kickoff or not _within(file.day, kickoff, lookback_days):
            continue
        arrival = _arrival(file, by_path.get(file.path))
        if arrival.sha256 in contents:
            known += 1
            continue
        contents.add(arrival.sha256)
        new.append(arrival)
        late += file.day < newest
    return Window(prefix.rstrip("/"), tuple(new), late, known)


def read_window(window: Window) -> list[dict[str, Any]]:
    """Read the rows of all new files, in the order of their paths.

    Raises DataError when a file is unreadable, or is no longer what the window saw, StorageError
    when the store doesn't answer.
    """
    rows: list[dict[str, Any]] = []
    for arrival in window.new:
        uri = f"{window.prefix}/{arrival.path}"
        data = read_bytes(uri)
        if hashlib.sha256(data).hexdigest() != arrival.sha256:
            raise DataError(
                f"{uri} was written again while this run ingested it; start the run again"
            )
        rows += parse_rows(data, uri)
    return rows


def _arrival(file: _Listed, before: Arrival | None) -> Arrival:
    """Hash a file, unless it stands as it was taken."""
    written = file.written.astimezone(UTC).isoformat()
    if before is not None and (before.size, before.written) == (file.size, written):
        return before
    digest = hashlib.sha256(read_bytes(file.uri)).hexdigest()
    return Arrival(path=file.path, sha256=digest, size=file.size, written=written)


def _within(day: date, kickoff: datetime, lookback_days: int) -> bool:
    today = kickoff.astimezone(UTC).date()
    return today - timedelta(days=lookback_days) <= day <= today


def _listed(prefix: str) -> Iterator[_Listed]:
    """All finished data files in dated folders, by path."""
    if not is_remote(prefix) and not as_path(prefix).is_dir():
        raise DataError(f"retrain.path={prefix!r} does not exist; give the folder of new data")
    with translated(prefix, DataError):
        files = Files(prefix)
        found = files.find()
    for path, entry in sorted(found.items()):
        day = _day_of(path)
        file = path.rsplit("/", 1)[-1]
        if day is None or file.startswith(_UNFINISHED) or not file.lower().endswith(SUFFIXES):
            continue
        uri = files.uri_of(entry["name"])
        yield _Listed(path, uri, day, int(entry["size"] or 0), _written(entry))


def _day_of(path: str) -> date | None:
    """The day that a path's first folder names; None for what is not in a dated folder."""
    folder, separator, _ = path.partition("/")
    match = _DAY.fullmatch(folder)
    if not separator or match is None:
        return None
    try:
        return date.fromisoformat(match[1])
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
        f"{entry.get('name')}: the store does not tell when it was written; use a folder or s3://"
    )
