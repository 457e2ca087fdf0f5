"""Artifact folders: written whole or not at all, named by their content.

What lives here: staging folders, publishing by rename and into the shared store, and bringing a
remote artifact to this machine. What does not: what a manifest says (`.manifest`), how an
artifact is complete in the store (`engine.storage.artifact_store`).

Layout under `home()`: `artifacts/<kind>/<16 hex digits>/` holds published artifacts and copies of
those in the shared store, `.staging/` those being written, `.cache/` copies of others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

from engine.errors import LineageError, StorageError
from engine.storage import artifact_store
from engine.storage.atomic import fsync, fsync_tree, process_is_alive, write_atomically
from engine.storage.filesystem import Files, translated
from engine.storage.hashing import MANIFEST, hash_file, tree_digest
from engine.storage.locations import (
    HOME_VARIABLE,
    artifact_path,
    home,
    is_artifact_address,
    local_copy_path,
    shared_address,
)
from engine.storage.manifest import Draft, Manifest, read_manifest, verify, write_manifest

RERUN_HINT = "run again with --overwrite-cache (or `make clean-cache`)"


@contextlib.contextmanager
def staging(kind: str) -> Iterator[Path]:
    """Yield a fresh folder to write an artifact of this kind into; `publish` moves it away.

    Whatever is still there at the end is removed, on success, error and Ctrl-C alike; a full
    disk becomes a StorageError, whichever library met it. Leftovers of processes that died are
    removed first.
    """
    root = home() / ".staging"
    folder = root / f"{kind}-{_owner()}-{uuid.uuid4().hex[:8]}"
    with _writing(folder):
        _remove_stale(root)
        folder.mkdir(parents=True)
    try:
        yield folder
    except Exception as error:
        # Other errors of a stage, a lost connection among them, are its own to explain.
        if not _says_disk_full(error):
            raise
        raise _unwritable(error, folder) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: str | Path, draft: Draft) -> Path:
    """Write the manifest of a staged folder and move it to its place; return that place.

    An equal artifact that is already there is kept when it is whole and replaced when it is not.
    One of equal content that was made of other parents or by another configuration keeps its place,
    and this one gets a name with a suffix: each keeps the manifest of what made it. Every file is
    on disk before the rename, so a published folder is never half-written. Where there is a shared
    store, it goes there as well (see `share`). Raises StorageError for an empty folder or when the
    disk or the store refuses.
    """
    folder = Path(folder)
    if not any(path.is_file() for path in folder.rglob("*")):
        raise StorageError(f"artifact folder {folder} has no files; nothing to publish")
    with _writing(folder):
        manifest = write_manifest(folder, draft)
        fsync_tree(folder)
        target = _target_of(manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        _move_into_place(folder, target, manifest)
    share(target)
    return target


def share(folder: str | Path) -> str:
    """Put a published artifact into the shared store; return the address that children name.

    What is there and whole is not sent again, and its manifest, which children elsewhere may know,
    becomes this machine's. Where there is no store, or the folder is no artifact of this machine's,
    nothing happens and the path is returned. Raises StorageError when the store refuses.
    """
    uri, own = shared_address(folder), Path(folder) / MANIFEST
    if uri == str(folder):
        return uri
    published = artifact_store.put(Path(folder), uri)
    if published != own.read_bytes():
        with _writing(own):
            write_atomically(own, [published])
    return uri


def local_path(uri: str | Path) -> Path:
    """Return a local path with the content of `uri`: a path, file://, or anything fsspec reads.

    A remote folder is downloaded once; one with a manifest is checked against it. Where an artifact
    is published and its manifest is not there, nothing is: its upload was cut off. Raises
    StorageError when nothing is there or the download fails, LineageError for damage.
    """
    text = os.fspath(uri)
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "file":
        return _download(text.rstrip("/"))
    path = Path(rest if separator else text).expanduser().absolute()
    if not path.exists():
        raise StorageError(f"artifact {path} was deleted or never written; {RERUN_HINT}")
    return path


def _download(uri: str) -> Path:
    """Fetch a remote file or folder, whole or not at all."""
    key = hashlib.sha256(uri.encode()).hexdigest()[:16]
    target = local_copy_path(uri) or home() / ".cache" / key / uri.rsplit("/", 1)[-1]
    try:
        with translated(uri, StorageError, "download", keep=(FileNotFoundError,)):
            files = Files(uri)
            manifest = _remote_manifest(files)
            if manifest is not None and _is_copy(target, manifest):
                return target
            with staging("download") as folder:
                draft = folder / target.name
                if manifest is not None and files.is_s3:
                    artifact_store.get(uri, draft, manifest)
                else:
                    files.request(lambda: files.fs.get(files.path, str(draft), recursive=True))
                    if (draft / MANIFEST).is_file():
                        verify(draft)
                fsync_tree(draft)
                target.parent.mkdir(parents=True, exist_ok=True)
                _keep_download(draft, target, manifest)
    except FileNotFoundError:
        raise StorageError(f"artifact {uri} was deleted or never written; {RERUN_HINT}") from None
    return target


def _remote_manifest(files: Files) -> bytes | None:
    """The bytes of a remote folder's manifest; None where it has none and needs none."""
    with contextlib.suppress(FileNotFoundError):
        return files.read(MANIFEST)
    if is_artifact_address(files.uri):
        raise StorageError(
            f"artifact {files.uri} was deleted or never written whole; {RERUN_HINT}, which uploads "
            "what is missing"
        )
    return None


def _keep_download(draft: Path, target: Path, manifest: bytes | None) -> None:
    """Rename a download to its place, unless an equal one was put there meanwhile.

    Another process may be reading that one already.
    """
    if not target.exists():
        _rename(draft, target)
        fsync(target.parent)
    elif not _is_equal(target, draft, manifest):
        _replace(draft, target)


def _is_equal(target: Path, draft: Path, manifest: bytes | None) -> bool:
    """Tell whether `target` has the content that was downloaded to `draft`."""
    if manifest is not None:
        return _is_copy(target, manifest)
    try:
        one, other = (hash_file(p) if p.is_file() else tree_digest(p) for p in (target, draft))
    except (LineageError, OSError):
        return False
    return one == other


def _is_copy(target: Path, manifest: bytes) -> bool:
    """Tell whether a local copy has these bytes as its manifest, and is as that says."""
    try:
        if (target / MANIFEST).read_bytes() != manifest:
            return False
        verify(target)
    except (LineageError, OSError):
        return False
    return True


def _target_of(manifest: Manifest) -> Path:
    """Return where an artifact goes: named by content, and by making where the content has two."""
    place = artifact_path(manifest.kind, manifest.digest)
    for where in dict.fromkeys((str(place), shared_address(place))):
        try:
            existing = read_manifest(where)
        except (LineageError, StorageError):
            # Nothing there, or nothing whole, which is replaced; or the store is away, which
            # `share` says once the artifact is safe on the disk.
            continue
        if existing.digest == manifest.digest and existing.inputs_digest != manifest.inputs_digest:
            return place.with_name(f"{place.name}-{manifest.inputs_digest[:8]}")
    return place


def _move_into_place(folder: Path, target: Path, manifest: Manifest) -> None:
    """Rename `folder` to `target`, giving way to an equal and whole artifact already there.

    One whose files were damaged gets them back; its manifest stays, because children know it.
    """
    if target.exists():
        if _is_whole(target, manifest.digest):
            shutil.rmtree(folder)
            return
        with contextlib.suppress(LineageError):
            if read_manifest(target).files == manifest.files:
                shutil.copyfile(target / MANIFEST, folder / MANIFEST)
                fsync(folder / MANIFEST)
        _replace(folder, target)
        return
    _rename(folder, target)
    fsync(target.parent)


def _replace(folder: Path, target: Path) -> None:
    """Put `folder` where `target` is; what was there leaves by a rename, then is deleted.

    Where others do the same at the same moment, one of them stays.
    """
    replaced = home() / ".staging" / f"replaced-{_owner()}-{uuid.uuid4().hex[:8]}"
    replaced.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # nothing there, or another has just taken it
        os.rename(target, replaced)
    try:
        _rename(folder, target)
    except BaseException:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    if replaced.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.unlink(missing_ok=True)
    fsync(target.parent)


def _rename(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; where another process was first, its folder stays."""
    try:
        os.rename(folder, target)
    except OSError as error:
        # Another process put the same content there between the check and the rename.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(folder)


def _is_whole(artifact: Path, digest: str) -> bool:
    """Re-hash an artifact against its manifest and the digest that it should have."""
    try:
        return verify(artifact).digest == digest
    except LineageError:
        return False


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError of a write into a sentence with the path and the way out."""
    try:
        yield
    except OSError as error:
        raise _unwritable(error, path) from error


def _unwritable(error: Exception, path: Path) -> StorageError:
    where = getattr(error, "filename", None) or path
    what = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if _says_disk_full(error):
        what = "no space left on the disk"
        way_out = f"free some, or set {HOME_VARIABLE} to a folder on another disk"
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        way_out = f"make it writable, or set {HOME_VARIABLE} to a folder that is"
    else:
        way_out = f"check the disk, or set {HOME_VARIABLE} to a folder on another one"
    return StorageError(f"can't write {where}: {what}; {way_out}")


def _says_disk_full(error: Exception) -> bool:
    """Recognise a full disk from Python, and from safetensors and torch, which give it no errno."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)
    return "No space left on device" in text or "inline_container.cc" in text


def _owner() -> str:
    """Return `<host>-<pid>`, by which `_remove_stale` knows whose staging folder it sees."""
    return f"{socket.gethostname().replace('-', '_')}-{os.getpid()}"


def _remove_stale(root: Path) -> None:
    """Remove staging folders whose process, on this host, is no longer alive."""
    host = _owner().rsplit("-", 1)[0]
    for folder in root.glob("*-*-*-*") if root.is_dir() else ():
        _, owner_host, pid, _ = folder.name.rsplit("-", 3)
        if owner_host == host and pid.isdigit() and not process_is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
