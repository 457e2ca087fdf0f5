"""SHA-256 of files where they lie, and of the code that runs, with the code's version by git."""

import functools
import hashlib
import importlib.util
import os
import subprocess
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

    Raises LineageError for one that is missing, unreadable or holds a link, else StorageError.
    """
    if is_remote(folder):
        address = str(folder).rstrip("/")
        with translated(address, LineageError):
            files = Files(address)
            names = sorted(files.sizes())
        if not names:
            raise LineageError(f"artifact folder {address} does not exist; check the address")
        names = [name for name in names if name != MANIFEST]

        def hash_remote(name: str) -> FileEntry:
            with translated(f"{address}/{name}", LineageError):
                return hash_chunks(files.chunks(name))

        with ThreadPoolExecutor(READERS) as pool:
            return dict(zip(names, pool.map(hash_remote, names), strict=True))
    base = as_path(folder)
    if not base.is_dir():
        raise LineageError(f"artifact folder {folder} does not exist; check the path")
    entries = {}
    for name, path in sorted((path.relative_to(base).as_posix(), path) for path in base.rglob("*")):
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


CODE_VERSION_VARIABLE = "HYBRIDFLYTE_CODE_VERSION"
PACKAGES = ("engine", "tasks", "examples")
SUFFIXES = (".py", ".c", ".h", ".j2", ".css", ".js")  # code, and the templates of pages


def project_root() -> Path:
    """Return the folder that holds the packages `engine` and `tasks`."""
    return Path(__file__).resolve().parents[2]


def sources_digest(root: str | Path | None = None) -> str:
    """SHA-256 (hex) of this project's sources, or those in engine/, tasks/, examples/ of `root`."""
    if root is None:
        return _project_digest()
    base = Path(root)
    paths = {
        path.relative_to(base).as_posix(): path
        for package in PACKAGES
        for path in (base / package).rglob("*")
        if path.suffix in SUFFIXES
    }
    contents = (f"{name}\0{hash_file(path)}\n" for name, path in sorted(paths.items()))
    return hashlib.sha256("".join(contents).encode()).hexdigest()


@functools.cache
def _project_digest() -> str:
    return sources_digest(project_root())


def modules_digest(names: Iterable[str]) -> str:
    """SHA-256 (hex) of the files of other people's modules, as far as found; empty without any."""
    lines = []
    for root in sorted({name.partition(".")[0] for name in names} - set(PACKAGES)):
        try:
            spec = importlib.util.find_spec(root)
        except (ImportError, ValueError):  # one that has no specification, such as __main__
            continue
        if spec is None:
            continue
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        files = [
            (path.relative_to(f).as_posix(), path) for f in folders for path in f.rglob("*.py")
        ]
        if not folders and spec.origin and Path(spec.origin).is_file():
            files = [(Path(spec.origin).name, Path(spec.origin))]
        lines += [f"{root}\0{name}\0{hash_file(path)}\n" for name, path in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def code_version() -> str:
    """$HYBRIDFLYTE_CODE_VERSION, or the git commit, "-dirty" for edited sources; else "unknown"."""
    return os.environ.get(CODE_VERSION_VARIABLE) or git_version(project_root())


@functools.cache
def git_version(root: Path) -> str:
    """Return the commit of the checkout at `root`, "-dirty" if a tracked or new source differs."""
    try:
        # A package installed below another project's checkout must not report its commit.
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"
        commit = _git(root, "rev-parse", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--", "*.py", "*.c", "*.h", "*.toml")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}-dirty" if dirty else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
