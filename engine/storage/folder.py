"""A folder of checkpoint files, on a disk or in an object store, with errors as CheckpointErrors.

Which files make a checkpoint is in `engine.checkpoint.format`.
"""

import contextlib
import errno
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from engine.errors import CheckpointError, DamagedCheckpointError, StorageError
from engine.storage import filesystem
from engine.storage.digests import FileEntry, HashedChunks, hash_chunks
from engine.storage.s3 import Objects, Uploader


class CheckpointStorageError(CheckpointError, StorageError):
    """The disk or object store of checkpoints refused, which another try may not meet again."""


class Folder:
    """One folder by its path or URI; a local one must exist before it is written to."""

    def __init__(self, uri: str | Path) -> None:
        """Raise CheckpointError for an address that no installed file system knows."""
        try:
            self.files = filesystem.Files(uri, filesystem.PATIENT)
        except Exception as error:  # fsspec's drivers raise errors of many libraries
            raise CheckpointError(
                f"checkpoint folder {uri} can't be used: {filesystem.error_text(error)}; give a "
                "local path or an address such as s3://bucket/run"
            ) from error
        self.uri, self.path = self.files.uri, self.files.path
        self.is_local = self.files.is_local

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write a file whole, on a disk through a temporary name; return what was written."""
        hashed = HashedChunks(chunks)
        with self._writing(name):
            if self.is_local:
                filesystem.write_atomically(Path(self.path) / name, hashed)
            elif self.files.is_s3:
                Uploader(Objects(self.uri)).write(name, hashed)
            else:
                with self.files.fs.open(self.files.path_of(name), "wb") as file:
                    for chunk in hashed:
                        file.write(chunk)
        return hashed.entry

    def read(self, name: str) -> bytes:
        """Return a file's bytes; DamagedCheckpointError when it is missing."""
        with self._reading(name):
            return self.files.read(name)

    def digest(self, name: str) -> FileEntry:
        """Hash a file without holding it in memory."""
        with self._reading(name):
            return hash_chunks(self.files.chunks(name))

    def entries(self) -> dict[str, filesystem.Entry]:
        """All that is in this folder, by name: files, folders, links that lead nowhere too."""
        with self._reading(""):
            entries = self.files.entries()
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in entries}

    def sizes(self) -> dict[str, int]:
        """The files in this folder and their sizes in bytes; none where there is no folder."""
        files = {k: entry for k, entry in self.entries().items() if entry["type"] == "file"}
        return {name: int(entry["size"] or 0) for name, entry in files.items()}

    def folders(self) -> list[str]:
        return sorted(k for k, entry in self.entries().items() if entry["type"] == "directory")

    def create(self) -> None:
        """Make the folder and those above it; an object store needs none."""
        if self.is_local:
            with self._writing(""):
                Path(self.path).mkdir(parents=True, exist_ok=True)

    def fsync(self) -> None:
        """Force what other code wrote into a local folder to the disk."""
        with self._writing(""):
            filesystem.fsync_tree(Path(self.path))

    def move(self, target: Self) -> bool:
        """Rename a local folder; return False, without effect, when there is one there."""
        with self._writing(""):
            filesystem.fsync(Path(self.path))
            return filesystem.move_folder(Path(self.path), Path(target.path))

    def remove_file(self, name: str) -> None:
        files = self.files
        with self._writing(name), contextlib.suppress(FileNotFoundError):
            files.request(lambda: files.fs.rm_file(files.path_of(name)))
            if files.is_local:
                filesystem.fsync(Path(self.path))

    def remove(self) -> None:
        files = self.files
        with self._writing(""), contextlib.suppress(FileNotFoundError):
            if self.is_local:
                shutil.rmtree(self.path)
            else:
                files.fs.invalidate_cache()
                files.request(lambda: files.fs.rm(self.path, recursive=True))

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """A file that is gone, or that the disk can't read, is damage; the rest is not."""
        where = f"{self.uri}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{where} is missing") from error
        except Exception as error:
            what = f"{where} can't be read: {filesystem.error_text(error)}"
            if self.is_local:
                raise DamagedCheckpointError(what) from error
            raise CheckpointStorageError(f"{what}; {filesystem.CHECK_S3}; start again") from error

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        where = f"{self.uri}/{name}".rstrip("/")
        try:
            yield
        except StorageError as error:  # its sentence is complete
            raise CheckpointStorageError(str(error)) from error
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            what, way_out = filesystem.error_text(error), "check the disk, or choose another folder"
            if number in (errno.ENOSPC, errno.EDQUOT):
                what, way_out = "no space left", "free some, keep fewer checkpoints, or move them"
            elif number == errno.EFBIG:
                way_out = "raise the limit on file sizes (ulimit -f), or choose another disk"
            elif not self.is_local:
                way_out = filesystem.CHECK_S3
            elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
                way_out = "make it writable, or choose another folder"
            elif number == errno.ENOENT:
                way_out = "all nodes must see one folder: use a shared disk or s3://"
            raise CheckpointStorageError(f"{where} can't be written: {what}; {way_out}") from error
