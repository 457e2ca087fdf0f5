"""Hashing the files of an artifact folder, on a disk or in an object store, where they lie.

What lives here: listing, reading and hashing. What does not: what a manifest says of the files
(`.manifest`), whether they are as recorded (`.audit`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import LineageError, StorageError
from engine.storage.s3 import passes
from engine.storage.s3 import settings as s3_settings

MANIFEST = "manifest.json"
SHA256 = r"^[0-9a-f]{64}$"
READERS = 8  # files of one remote folder hashed at once
CHUNK = 8 << 20  # bytes


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int = Field(ge=0, description="Bytes, e.g. 5242880")
    sha256: str = Field(pattern=SHA256)


def is_remote(address: str | Path) -> bool:
    """Tell addresses such as s3://… from paths; file:// counts as a path."""
    return "://" in str(address) and not str(address).startswith("file://")


def as_path(address: str | Path) -> Path:
    """Return the path of a local address, file:// or plain."""
    text = str(address)
    return Path(text.removeprefix("file://") if text.startswith("file://") else text).expanduser()


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


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a local file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(files: Mapping[str, FileEntry]) -> str:
    """Return the SHA-256 (hex) over the sorted paths and the hashes of the files' bytes."""
    lines = (f"{name}\0{files[name].sha256}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tree_digest(folder: str | Path) -> str:
    """Return the content digest of a folder, its manifest left out."""
    return content_digest(hash_files(folder))


def read_bytes(address: str | Path) -> bytes:
    """Read one local or remote file.

    Raises FileNotFoundError, StorageError when a store doesn't answer, or LineageError.
    """
    try:
        if not is_remote(address):
            return as_path(address).read_bytes()
        filesystem, path = file_system(str(address))
        filesystem.invalidate_cache()
        return bytes(filesystem.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(address)) from None
    except (LineageError, StorageError):
        raise
    except Exception as error:  # fsspec's drivers raise errors of many libraries
        raise unreadable(address, error) from error


def file_system(address: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address and the path in it; LineageError if unknown."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(address, **s3_settings(address))
    except Exception as error:
        raise unreadable(address, error) from error
    return filesystem, str(path).rstrip("/")


def unreadable(address: str | Path, error: Exception) -> LineageError | StorageError:
    """Put what a file system raised into one sentence.

    A store that doesn't answer is a StorageError: it may answer another try, and nothing that is
    in it is found to be wrong.
    """
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    away = is_remote(address) and passes(error)
    return (StorageError if away else LineageError)(
        f"can't read {address}: {words}; check the address, its credentials and the endpoint"
    )


def _hash_remote(folder: str) -> dict[str, FileEntry]:
    filesystem, base = file_system(folder)
    try:
        filesystem.invalidate_cache()
        found: Iterable[str] = filesystem.find(base)
        # A key that equals the folder's own name is S3's mark of an empty folder.
        names = sorted(path[len(base) + 1 :] for path in found if len(path) > len(base) + 1)
    except Exception as error:
        raise unreadable(folder, error) from error
    if not names:
        raise LineageError(f"artifact folder {folder} does not exist; check the address")
    content = [name for name in names if name != MANIFEST]

    def hash_one(name: str) -> FileEntry:
        try:
            return _hash_stream(filesystem, f"{base}/{name}")
        except Exception as error:
            raise unreadable(f"{folder}/{name}", error) from error

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(content, pool.map(hash_one, content), strict=True))


def _hash_stream(filesystem: Any, path: str) -> FileEntry:
    sha, size = hashlib.sha256(), 0
    with filesystem.open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
            size += len(chunk)
    return FileEntry(size=size, sha256=sha.hexdigest())
