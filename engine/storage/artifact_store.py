"""Artifacts in the shared store: complete there by their manifest, which is written last.

What lives here: `put` and `get` of one artifact at one address. What does not: when that is done
(`artifacts`), where the store is (`locations`), moving files (`transfer`).
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import LineageError, StorageError
from engine.storage.filesystem import QUICK
from engine.storage.hashing import MANIFEST
from engine.storage.manifest import Manifest, parse_manifest, verify
from engine.storage.objects import Objects
from engine.storage.transfer import download, upload


def put(folder: Path, uri: str) -> bytes:
    """Make `uri` hold a published folder; return the bytes of its manifest there.

    An artifact of equal content and inputs that is there keeps its manifest, because children know
    it, and gets the files that it lacks. Cut off anywhere, this leaves no manifest where there was
    none, and a second call sends what is missing. Raises StorageError when S3 refuses, or another
    artifact is there.
    """
    data = (folder / MANIFEST).read_bytes()
    manifest = parse_manifest(data, str(folder))
    objects = Objects(uri, QUICK)
    existing = _existing(objects, manifest)
    upload(folder, uri, manifest.files, f"upload {manifest.kind} {manifest.digest[:12]}")
    if existing is not None:
        return existing
    if objects.put(MANIFEST, data, only_new=True):
        return data
    # Another process has published the same since: whose manifest was first counts for both.
    return _existing(objects, manifest) or data


def get(uri: str, folder: Path, data: bytes) -> None:
    """Fetch the artifact at `uri`, whose manifest's bytes are `data`, into `folder`, checked.

    Raises StorageError when S3 refuses or a file is missing, LineageError when one differs.
    """
    manifest = parse_manifest(data, f"{uri}/{MANIFEST}")
    folder.mkdir(parents=True, exist_ok=True)
    download(uri, folder, manifest.files, f"download {manifest.kind} {manifest.digest[:12]}")
    (folder / MANIFEST).write_bytes(data)
    verify(folder)


def _existing(objects: Objects, manifest: Manifest) -> bytes | None:
    """The manifest that is there, None where there is none. StorageError for another artifact's."""
    try:
        data = objects.read(MANIFEST)
    except FileNotFoundError:
        return None
    try:
        theirs = parse_manifest(data, f"{objects.uri}/{MANIFEST}")
    except LineageError as error:
        raise StorageError(f"{error}; remove it, and publish again") from error
    if theirs.files != manifest.files or theirs.inputs_digest != manifest.inputs_digest:
        raise StorageError(
            f"{objects.uri} holds another artifact ({theirs.kind} {theirs.digest[:12]}, made "
            f"{theirs.created_at:%Y-%m-%d %H:%M}); it stays as it is; publish again, and if it "
            f"still stands there, see `python -m engine.lineage verify {objects.uri}`"
        )
    return data
