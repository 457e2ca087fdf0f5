"""Moving the files of a folder to and from S3: in parallel, in parts, checked, with progress.

What lives here: `upload` and `download`. What does not: single requests (`.s3`), and what makes a
folder complete: that is for the caller to write last and to read first.

Requests of all files share one bound, so memory is at most PARALLEL parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from engine.console import Progress, progress
from engine.errors import StorageError
from engine.storage.s3 import PATIENT, SUM, Objects

PARALLEL = 8  # requests at once
PART = 16 << 20  # bytes
MAX_PARTS = 10_000  # S3's limit for one object
LARGE = 64 << 20  # bytes; what is smaller is moved without a word


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a folder, as it must be."""

    name: str  # below the folder, e.g. "splits/train.txt"
    size: int  # bytes
    sha256: str  # hex


def upload(folder: Path, uri: str, items: Sequence[Item], label: str = "upload") -> int:
    """Send the files of `folder` to `uri` that are not there yet; return how many bytes that were.

    A file appears there whole or not at all. What an earlier call has brought stays. Raises
    StorageError when S3 refuses to the end, or a file is not as `items` says; parts that were sent
    are then forgotten.
    """
    objects = Objects(uri, PATIENT)
    _within_folder(uri, items)
    with _pool() as pool:
        lacking = _lacking(objects, items, pool)
        sending = [_Sending(objects, folder / item.name, item) for item in lacking]
        total = sum(item.size for item in lacking)
        try:
            with _moving(total, label) as moved:
                list(pool.map(_Sending.begin, sending))
                futures = [pool.submit(one.send, n) for one in sending for n in one.numbers]
                for future in as_completed(futures):
                    moved.add(future.result())
        finally:
            _stop(pool)
            for one in sending:
                one.abort()
    if lacking:
        _check_sizes(objects, items)
    return total


def download(uri: str, folder: Path, items: Sequence[Item], label: str = "download") -> None:
    """Fetch files from `uri` into `folder`, which is made; whether they are right is unknown.

    Raises StorageError when S3 refuses to the end, or a file is missing or shorter than it must be.
    """
    objects = Objects(uri, PATIENT)
    _within_folder(uri, items)
    pieces: list[tuple[Item, int]] = []
    for item in items:
        path = folder / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(item.size)
        pieces += [(item, start) for start in range(0, item.size, PART)]

    def fetch(item: Item, start: int) -> int:
        end = min(start + PART, item.size)
        try:
            data = objects.read(item.name, start, end)
        except FileNotFoundError:
            raise StorageError(
                f"{uri}/{item.name} is missing; the artifact was damaged, make it again"
            ) from None
        if len(data) != end - start:
            raise StorageError(
                f"{uri}/{item.name} differs from the manifest: it ends before byte {end} of "
                f"{item.size}; the artifact was damaged, make it again"
            )
        with (folder / item.name).open("r+b") as file:
            os.pwrite(file.fileno(), data, start)
        return len(data)

    with _pool() as pool:
        try:
            with _moving(sum(item.size for item in items), label) as moved:
                for future in as_completed([pool.submit(fetch, *piece) for piece in pieces]):
                    moved.add(future.result())
        finally:
            _stop(pool)


@dataclass
class _Sending:
    """One file on its way: in one request, or in parts that S3 puts together at the end."""

    objects: Objects
    path: Path
    item: Item
    upload: str = ""  # S3's id of an object in parts
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)  # those that have arrived
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def part(self) -> int:
        """Bytes of each part but the last."""
        return max(PART, -(-self.item.size // MAX_PARTS))

    @property
    def numbers(self) -> range:
        """The parts, from 1; a file that is sent whole has one."""
        return range(1, max(1, -(-self.item.size // self.part)) + 1)

    def begin(self) -> None:
        """Make sure that the file is what is promised, and announce its parts."""
        if len(self.numbers) == 1:
            return  # hashed when it is sent
        with self.path.open("rb") as file:
            self._expect(hashlib.file_digest(file, "sha256").hexdigest())
        self.upload = self.objects.begin(self.item.name, {SUM: self.item.sha256})

    def send(self, number: int) -> int:
        """Send one part, and after the last of them to arrive make the object; return its bytes."""
        data = self._read((number - 1) * self.part)
        if len(self.numbers) == 1:
            self._expect(hashlib.sha256(data).hexdigest())
            self.objects.write(self.item.name, data)
            return len(data)
        part = self.objects.add_part(self.item.name, self.upload, number, data)
        with self.lock:
            self.parts[number] = part
            whole = len(self.parts) == len(self.numbers)
        if whole:
            parts = [self.parts[n] for n in self.numbers]
            self.objects.finish(self.item.name, self.upload, parts, {SUM: self.item.sha256})
            self.upload = ""
        return len(data)

    def abort(self) -> None:
        """Forget parts that were not put together."""
        if self.upload:
            self.objects.abort(self.item.name, self.upload)

    def _read(self, start: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                return os.pread(file.fileno(), self.part, start)
        except OSError as error:
            raise StorageError(f"can't read {self.path}: {error.strerror or error}") from error

    def _expect(self, sha256: str) -> None:
        if sha256 != self.item.sha256:
            raise StorageError(
                f"{self.path} is not what its manifest says (SHA-256 {sha256[:12]}, recorded "
                f"{self.item.sha256[:12]}); it is not uploaded; make the artifact again"
            )


def _lacking(objects: Objects, items: Sequence[Item], pool: ThreadPoolExecutor) -> list[Item]:
    """The files that are not there yet, or not as they were written by this module."""
    sizes = objects.sizes()

    def is_there(item: Item) -> bool:
        if sizes.get(item.name) != item.size:
            return False
        return objects.metadata(item.name).get(SUM) == item.sha256

    return [item for item, there in zip(items, pool.map(is_there, items), strict=True) if not there]


def _check_sizes(objects: Objects, items: Sequence[Item]) -> None:
    sizes = objects.sizes()
    for item in items:
        found = sizes.get(item.name)
        if found != item.size:
            raise StorageError(
                f"{objects.uri}/{item.name} has {found or 'no'} bytes after its upload, not "
                f"{item.size}; somebody else writes there, upload it again"
            )


def _within_folder(uri: str, items: Sequence[Item]) -> None:
    """Refuse names that lead out of the folder, which no manifest of ours has."""
    for item in items:
        path = PurePosixPath(item.name)
        if path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
            raise StorageError(f"{uri} names a file {item.name!r} outside of it; it was forged")


class _Moved:
    """Bytes moved so far, shown in MiB; used by one thread."""

    def __init__(self, bar: Progress[Any] | None) -> None:
        self._bar, self._bytes, self._shown = bar, 0, 0

    def add(self, count: int) -> None:
        """Count `count` bytes more."""
        self._bytes += count
        step = (self._bytes >> 20) - self._shown
        if self._bar is not None and step:
            self._shown += step
            self._bar.update(step)


@contextlib.contextmanager
def _moving(total: int, label: str) -> Iterator[_Moved]:
    """Show progress over `total` bytes where they are many."""
    if total < LARGE:
        yield _Moved(None)
        return
    bar: Progress[Any] = progress(total >> 20, label, "MiB")
    with bar:
        yield _Moved(bar)


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="transfer")
    try:
        yield pool
    finally:
        _stop(pool)


def _stop(pool: ThreadPoolExecutor) -> None:
    """Let requests that were sent come to their end, which is near, and begin no more."""
    pool.shutdown(wait=True, cancel_futures=True)
