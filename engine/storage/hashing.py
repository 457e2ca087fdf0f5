"""SHA-256 of files: as they are written, on a disk, and in an object store, where they lie.

What lives here: hashing and listing. What does not: what a manifest says of the files
(`.manifest`), reading (`.filesystem`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import EngineError, LineageError
from engine.storage.filesystem import CHUNK, Files, as_path, is_remote, translated

MANIFEST = "manifest.json"
SHA256 = r"^[0-9a-f]{64}$"
READERS = 8  # files of one remote folder hashed at once


class FileEntry(BaseModel):
    """Size and digest of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=0, description="Bytes, e.g. 5242880")
    sha256: str = Field(pattern=SHA256)


class HashedChunks:
    """Passes bytes on and hashes them on the way; `entry` is complete after the last of them."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks, self._sha, self._size = chunks, hashlib.sha256(), 0

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in self._chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK):  # each is still in a cache when it is written
                part = view[start : start + CHUNK]
                self._sha.update(part)
                self._size += len(part)
                yield part

    @property
    def entry(self) -> FileEntry:
        """Size and digest of what was passed on so far."""
        return FileEntry(size=self._size, sha256=self._sha.hexdigest())


def hash_chunks(chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Return size and digest of bytes, which are not kept."""
    hashed = HashedChunks(chunks)
    for _ in hashed:
        pass
    return hashed.entry


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a local file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: str | Path) -> dict[str, FileEntry]:
    """Hash every file below `folder` but its manifest, in the order of their paths.

    A remote folder is read where it is, through no cache. Raises LineageError when the folder is
    missing or unreadable, or holds a link, which a copy of the folder would not carry, and
    StorageError when a store doesn't answer, which says nothing of what is in it.
    """
    if is_remote(folder):
        return _hash_remote(str(folder).rstrip("/"))
    base = as_path(folder)
    if not base.is_dir():
        raise LineageError(f"artifact folder {folder} does not exist; check the path")
    entries = {}
    for path in sorted(base.rglob("*"), key=lambda path: path.relative_to(base).as_posix()):
        name = path.relative_to(base).as_posix()
        if path.is_symlink():
            raise LineageError(f"{path} is a link; put a copy of what it points to in its place")
        if path.is_file() and name != MANIFEST:
            try:
                entries[name] = FileEntry(size=path.stat().st_size, sha256=hash_file(path))
            except OSError as error:
                raise LineageError(f"can't read {path}: {error.strerror or error}") from error
    return entries


def require_inside(names: Iterable[str], where: str, refused: type[EngineError]) -> None:
    """Raise `refused` for a file name that leads out of its folder, which none of ours does."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
            raise refused(f"{where} names a file {name!r} outside of its folder; it was forged")


def content_digest(files: Mapping[str, FileEntry]) -> str:
    """Return the SHA-256 (hex) over the sorted paths and the hashes of the files' bytes."""
    lines = (f"{name}\0{files[name].sha256}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tree_digest(folder: str | Path) -> str:
    """Return the content digest of a folder, its manifest left out."""
    return content_digest(hash_files(folder))


def _hash_remote(folder: str) -> dict[str, FileEntry]:
    with translated(folder, LineageError):
        files = Files(folder)
        names = sorted(files.sizes())
    if not names:
        raise LineageError(f"artifact folder {folder} does not exist; check the address")
    content = [name for name in names if name != MANIFEST]

    def hash_one(name: str) -> FileEntry:
        with translated(f"{folder}/{name}", LineageError):
            return hash_chunks(files.chunks(name))

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(content, pool.map(hash_one, content), strict=True))
