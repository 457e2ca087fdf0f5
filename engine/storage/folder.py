"""A folder of checkpoint files, on a disk or in an object store (`s3://…`), through fsspec.

What lives here: reading, writing and removing with checksums, and turning what a file system
raises into one sentence. What does not: which files make a checkpoint (`layout`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from engine.errors import CheckpointError, DamagedCheckpointError, StorageError
from engine.storage.fsync import fsync, fsync_tree
from engine.storage.multipart import send
from engine.storage.s3 import SCHEME, Objects, from_environment

_CHUNK = 8 << 20  # bytes hashed or written at once


class CheckpointStorageError(CheckpointError, StorageError):
    """The disk or object store of checkpoints refused, which another try may not meet again."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a file must be."""

    sha256: str  # hex
    size: int  # bytes


class Folder:
    """One folder by its path or URI; a local one must exist before it is written to."""

    def __init__(self, uri: str | Path) -> None:
        """Raise CheckpointError for an address that no installed file system knows."""
        text = os.fspath(uri)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        try:
            self.fs, path = fsspec.core.url_to_fs(text, **from_environment(text))
        except Exception as error:  # fsspec's drivers raise errors of many libraries
            raise CheckpointError(
                f"checkpoint folder {text} can't be used: {_first_line(error)}; give a local path "
                "or an address such as s3://bucket/run"
            ) from error
        self.uri, self.path = text.rstrip("/"), str(path).rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileSum:
        """Write a file whole, on a disk through a temporary name; return what was written."""
        if self.uri.startswith(SCHEME):
            with self._writing(name):
                return FileSum(*send(Objects(self.uri), name, chunks))
        sha, size = hashlib.sha256(), 0
        draft = f"{name}.part" if self.is_local else name
        with self._writing(name):
            with self.fs.open(f"{self.path}/{draft}", "wb") as file:
                for chunk in chunks:
                    for start in range(0, len(chunk), _CHUNK):
                        part = chunk[start : start + _CHUNK]
                        file.write(part)
                        sha.update(part)
                        size += len(part)
                if self.is_local:
                    file.flush()
                    os.fsync(file.fileno())
            if self.is_local:
                os.rename(f"{self.path}/{draft}", f"{self.path}/{name}")
        return FileSum(sha.hexdigest(), size)

    def read(self, name: str) -> bytes:
        """Return a file's bytes; DamagedCheckpointError when it is missing."""
        with self._reading(name):
            return bytes(self.fs.cat_file(f"{self.path}/{name}"))

    def sum(self, name: str) -> FileSum:
        """Hash a file without holding it in memory."""
        sha, size = hashlib.sha256(), 0
        with self._reading(name), self.fs.open(f"{self.path}/{name}", "rb") as file:
            while chunk := file.read(_CHUNK):
                sha.update(chunk)
                size += len(chunk)
        return FileSum(sha.hexdigest(), size)

    def sizes(self) -> dict[str, int]:
        """The files in this folder and their sizes in bytes; none where there is no folder."""
        return {
            _basename(entry["name"]): int(entry["size"])
            for entry in self._entries()
            if entry["type"] == "file"
        }

    def folders(self) -> list[str]:
        """Names of the folders in this one."""
        return sorted(_basename(e["name"]) for e in self._entries() if e["type"] == "directory")

    def names(self) -> set[str]:
        """Names of all that is in this folder: files, folders, links that lead nowhere too."""
        return {_basename(entry["name"]) for entry in self._entries()}

    def create(self) -> None:
        """Make the folder and those above it; an object store needs none."""
        if self.is_local:
            with self._writing(""):
                Path(self.path).mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        """Force what other code wrote into a local folder to the disk."""
        with self._writing(""):
            fsync_tree(Path(self.path))

    def move(self, target: Folder) -> bool:
        """Rename a local folder; return False, without effect, when there is one there."""
        with self._writing(""):
            fsync(Path(self.path))
            try:
                os.rename(self.path, target.path)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            fsync(Path(target.path).parent)
        return True

    def remove_file(self, name: str) -> None:
        """Delete one file; one that isn't there is as good."""
        with self._writing(name), contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.path}/{name}")
            if self.is_local:
                fsync(Path(self.path))

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        with self._writing(""), contextlib.suppress(FileNotFoundError):
            if self.is_local:
                shutil.rmtree(self.path)
            else:
                self.fs.invalidate_cache()
                self.fs.rm(self.path, recursive=True)

    def _entries(self) -> Iterator[dict[str, str]]:
        with self._reading(""):
            try:
                self.fs.invalidate_cache()  # other processes write here too
                found = self.fs.ls(self.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        return (entry for entry in found if entry["name"].rstrip("/") != self.path)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A file that is gone, or that the disk can't read, is damage; the rest is not."""
        where = f"{self.uri}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{where} is missing") from error
        except Exception as error:
            what = f"{where} can't be read: {_first_line(error)}"
            if self.is_local:
                raise DamagedCheckpointError(what) from error
            raise CheckpointStorageError(
                f"{what}; check the address, its credentials and the endpoint, and start again"
            ) from error

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        where = f"{self.uri}/{name}".rstrip("/")
        try:
            yield
        except StorageError as error:  # it has all that is to be said
            raise CheckpointStorageError(str(error)) from error
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            what, way_out = _first_line(error), "check the disk, or choose another folder"
            if number in (errno.ENOSPC, errno.EDQUOT):
                what, way_out = "no space left", "free some, keep fewer checkpoints, or move them"
            elif number == errno.EFBIG:
                way_out = "raise the limit on file sizes (ulimit -f), or choose another disk"
            elif not self.is_local:
                way_out = "check the address, its credentials and the endpoint"
            elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
                way_out = "make it writable, or choose another folder"
            elif number == errno.ENOENT:
                way_out = "all nodes must see one folder: use a shared disk or s3://"
            raise CheckpointStorageError(f"{where} can't be written: {what}; {way_out}") from error


def _basename(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _first_line(error: Exception) -> str:
    text = (getattr(error, "strerror", None) or str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
