"""The files of a folder to and from S3: in parallel, checked, with progress.

What lives here: `upload` and `download`. What does not: parts and requests (`.multipart`,
`.objects`), and what makes a folder complete: that is for the caller to write last and read first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from engine.console import Progress, progress
from engine.errors import StorageError
from engine.storage.filesystem import CHUNK
from engine.storage.hashing import FileEntry, hash_file, require_inside
from engine.storage.multipart import PARALLEL, Uploader
from engine.storage.objects import SHA256_KEY, Objects

RANGE = 16 << 20  # bytes fetched in one request; PARALLEL of them are in memory
LARGE = 64 << 20  # bytes; what is smaller is moved without progress


def upload(folder: Path, uri: str, files: Mapping[str, FileEntry], label: str = "upload") -> int:
    """Send the files of `folder` to `uri` that are not there yet; return their size in bytes.

    A file appears there whole or not at all. What an earlier call has sent stays. Raises
    StorageError when S3 refuses to the end, or a file is not as `files` says; the parts that were
    sent are then deleted.
    """
    objects = Objects(uri)
    require_inside(files, uri, StorageError)
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="upload") as pool:
        missing = _missing(objects, files, pool)
        total = sum(entry.size for entry in missing.values())
        with _moving(total, label) as moved:
            uploader = Uploader(objects, moved.add)
            futures = [
                pool.submit(
                    uploader.write, name, _checked(folder / name, entry), entry.size, entry.sha256
                )
                for name, entry in missing.items()
            ]
            _wait(futures, pool, uploader)
    if missing:
        _check_sizes(objects, files)
    return total


def download(
    uri: str, folder: Path, files: Mapping[str, FileEntry], label: str = "download"
) -> None:
    """Fetch files from `uri` into `folder`, which is made; their content is not checked.

    Raises StorageError when S3 refuses to the end, or a file is missing or too short.
    """
    objects = Objects(uri)
    require_inside(files, uri, StorageError)
    ranges: list[tuple[str, int, int]] = []
    for name, entry in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(entry.size)
        ranges += [(name, start, entry.size) for start in range(0, entry.size, RANGE)]
    total = sum(entry.size for entry in files.values())
    with (
        ThreadPoolExecutor(PARALLEL, thread_name_prefix="download") as pool,
        _moving(total, label) as moved,
    ):

        def fetch(name: str, start: int, size: int) -> None:
            moved.add(_fetch(objects, folder, name, start, size))

        _wait([pool.submit(fetch, *one) for one in ranges], pool)


def _fetch(objects: Objects, folder: Path, name: str, start: int, size: int) -> int:
    """Fetch one range of a file of `size` bytes to its place; return its bytes."""
    end = min(start + RANGE, size)
    try:
        data = objects.read(name, start, end)
    except FileNotFoundError:
        raise StorageError(
            f"{objects.uri}/{name} is missing; the artifact was damaged, make it again"
        ) from None
    if len(data) != end - start:
        raise StorageError(
            f"{objects.uri}/{name} differs from the manifest: it ends before byte {end} of "
            f"{size}; the artifact was damaged, make it again"
        )
    with (folder / name).open("r+b") as file:
        os.pwrite(file.fileno(), data, start)
    return len(data)


def _wait(
    futures: list[Future[None]], pool: ThreadPoolExecutor, uploader: Uploader | None = None
) -> None:
    """Wait for all; after an error, begin no more requests and let those under way end."""
    try:
        for future in as_completed(futures):
            future.result()
    except BaseException:
        if uploader is not None:
            uploader.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
        raise


def _checked(path: Path, entry: FileEntry) -> Iterator[bytes]:
    """The bytes of a file; StorageError, before the last of them, unless it is as `entry` says."""
    sha, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            whole = os.fstat(file.fileno()).st_size == entry.size
            while whole and size < entry.size:
                chunk = file.read(CHUNK)
                sha.update(chunk)
                size += len(chunk)
                if not chunk or (size >= entry.size and sha.hexdigest() != entry.sha256):
                    whole = False
                else:
                    yield chunk
        found = "" if whole else hash_file(path)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror or error}") from error
    if not whole:
        raise StorageError(
            f"{path} is not what its manifest says (SHA-256 {found[:12]}, recorded "
            f"{entry.sha256[:12]}); it is not uploaded; make the artifact again"
        )


def _missing(
    objects: Objects, files: Mapping[str, FileEntry], pool: ThreadPoolExecutor
) -> dict[str, FileEntry]:
    """The files that are not there yet, or not as this module wrote them."""
    sizes = objects.sizes()

    def is_there(name: str) -> bool:
        if sizes.get(name) != files[name].size:
            return False
        return objects.metadata(name).get(SHA256_KEY) == files[name].sha256

    there = zip(files, pool.map(is_there, files), strict=True)
    return {name: files[name] for name, found in there if not found}


def _check_sizes(objects: Objects, files: Mapping[str, FileEntry]) -> None:
    sizes = objects.sizes()
    for name, entry in files.items():
        found = sizes.get(name)
        if found != entry.size:
            raise StorageError(
                f"{objects.uri}/{name} has {found or 'no'} bytes after its upload, not "
                f"{entry.size}; somebody else writes there, upload it again"
            )


class _Moved:
    """Bytes moved so far, shown in MiB."""

    def __init__(self, show: Callable[[int], None] | None) -> None:
        self._show, self._bytes, self._shown = show, 0, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count `count` bytes more."""
        with self._lock:
            self._bytes += count
            step = (self._bytes >> 20) - self._shown
            if self._show is not None and step:
                self._shown += step
                self._show(step)


@contextlib.contextmanager
def _moving(total: int, label: str) -> Iterator[_Moved]:
    """Show progress over `total` bytes where they are many."""
    if total < LARGE:
        yield _Moved(None)
        return
    bar: Progress[object] = progress(total >> 20, label, "MiB")
    with bar:
        yield _Moved(bar.update)
