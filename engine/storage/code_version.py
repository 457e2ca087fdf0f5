"""Which code is running: its git commit, and digests of sources, ours and a user's, without git."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import engine

CODE_VERSION_VARIABLE = "HYBRIDFLYTE_CODE_VERSION"
PACKAGES = ("engine", "tasks")
SUFFIXES = (".py", ".c", ".h", ".j2", ".css", ".js")  # code, and the templates of pages


def project_root() -> Path:
    """Return the folder that holds the packages `engine` and `tasks`."""
    return Path(engine.__file__).resolve().parent.parent


def sources_digest(root: str | Path | None = None) -> str:
    """Return the SHA-256 (hex) of every source file under engine/ and tasks/ of `root`.

    It depends on names below `root` and on bytes alone: neither on the place of the checkout nor
    on modification times, so that it can be part of cache keys. Without `root` it is that of the
    project, whose files a process reads once.
    """
    return _files_digest(Path(root)) if root is not None else _project_digest()


@functools.cache
def _project_digest() -> str:
    return _files_digest(project_root())


def _files_digest(base: Path) -> str:
    digest = hashlib.sha256()
    found = [path for package in PACKAGES for path in (base / package).rglob("*")]
    files = [path for path in found if path.suffix in SUFFIXES]
    for path in sorted(files, key=lambda path: path.relative_to(base).as_posix()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(base).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def modules_digest(names: Iterable[str]) -> str:
    """Return the SHA-256 (hex) of the sources that modules come from; empty without any.

    That is a module's file, or every *.py file of the package that it is in. Nothing is imported.
    Ours are left out, which `sources_digest` has, as are modules that aren't found.
    """
    roots = sorted({name.partition(".")[0] for name in names} - set(PACKAGES))
    lines = [
        f"{root}\0{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for root in roots
        for name, path in _files_of(root)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def _files_of(root: str) -> list[tuple[str, Path]]:
    """The sources of a top-level module, by name below its folder."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):  # one that has no specification, such as __main__
        spec = None
    if spec is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {
        path.relative_to(folder).as_posix(): path
        for folder in folders
        for path in folder.rglob("*.py")
    }
    if not folders and spec.origin and Path(spec.origin).is_file():
        files[Path(spec.origin).name] = Path(spec.origin)
    return sorted(files.items())


def code_version() -> str:
    """Return $HYBRIDFLYTE_CODE_VERSION, or the git commit, with "-dirty" for edited sources.

    "unknown" outside a git checkout; `sources_digest` still tells versions apart there.
    """
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
