"""The manifest of an artifact folder: what it holds, what made it, and what it came from.

What lives here: the model of `manifest.json`, hashing a folder, writing, reading and checking.
What does not: where artifacts are kept (`engine.artifacts`), walking parents (`.tree`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import LineageError
from engine.lineage.code import code_version, sources_digest

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
SHA256 = r"^[0-9a-f]{64}$"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class FileEntry(_Frozen):
    """One file of an artifact."""

    size: int = Field(ge=0, description="Bytes, e.g. 5242880")
    sha256: str = Field(pattern=SHA256)


class Parent(_Frozen):
    """What an artifact was made from."""

    name: str = Field(min_length=1, description="Its part in the making, e.g. `warm_start`")
    kind: str = Field(min_length=1, description="e.g. `sft`; `source` for data made elsewhere")
    digest: str = Field(min_length=1, description="Content digest, hex")
    uri: str = Field("", description="Folder or address; empty for what has none")


class Draft(_Frozen):
    """What a stage says of its artifact; `write_manifest` adds the rest."""

    kind: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="e.g. dataset, sft, rl, evaluation")
    parents: tuple[Parent, ...] = ()
    config: dict[str, Any] = Field(default_factory=dict, description="JSON values only")
    metrics: dict[str, float] = Field(default_factory=dict)
    flyte_execution: str = ""
    mlflow_run: str = ""


class Manifest(Draft):
    """All of `manifest.json`."""

    schema_version: int = SCHEMA_VERSION
    digest: str = Field(pattern=SHA256, description="Content digest of all other files")
    files: dict[str, FileEntry] = Field(description="By path below the folder, with / inside")
    code_version: str
    sources_digest: str
    config_digest: str
    created_at: datetime

    def as_parent(self, name: str, uri: str | Path = "") -> Parent:
        """Return the reference that a child of this artifact writes into its own manifest."""
        return Parent(name=name, kind=self.kind, digest=self.digest, uri=str(uri))


def hash_files(folder: str | Path) -> dict[str, FileEntry]:
    """Hash every file below `folder` but its manifest, in the order of their paths.

    Raises LineageError when the folder is missing or holds a link, which a copy of the folder
    would not carry.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise LineageError(f"artifact folder {folder} does not exist; check the path")
    entries = {}
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise LineageError(f"{path} is a link; put a copy of what it points to in its place")
        if path.is_file() and name != MANIFEST:
            entries[name] = FileEntry(size=path.stat().st_size, sha256=hash_file(path))
    return entries


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(files: Mapping[str, FileEntry]) -> str:
    """Return the SHA-256 (hex) over the sorted paths and the hashes of the files' bytes."""
    lines = (f"{name}\0{files[name].sha256}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tree_digest(folder: str | Path) -> str:
    """Return the content digest of a folder, its manifest left out."""
    return content_digest(hash_files(folder))


def json_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of JSON values, whatever the order of their keys.

    The same values give the same digest as `engine.config.digest` of the section they came from.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_manifest(folder: str | Path, draft: Draft) -> Manifest:
    """Hash `folder`, write its manifest.json in one step, and return it.

    Raises LineageError when the configuration is not JSON.
    """
    folder = Path(folder)
    files = hash_files(folder)
    try:
        config_digest = json_digest(draft.config)
    except (TypeError, ValueError) as error:
        raise LineageError(f"config of the {draft.kind} artifact is not JSON: {error}") from None
    manifest = Manifest(
        **dict(draft),
        digest=content_digest(files),
        files=files,
        code_version=code_version(),
        sources_digest=sources_digest(),
        config_digest=config_digest,
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    draft_file = folder / f".{MANIFEST}.{os.getpid()}"
    try:
        draft_file.write_text(manifest.model_dump_json(indent=2) + "\n")
        os.replace(draft_file, folder / MANIFEST)
    except BaseException:
        with contextlib.suppress(OSError):
            draft_file.unlink(missing_ok=True)
        raise
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a local or remote (`s3://…`) artifact folder; LineageError if it can't.

    A manifest of a newer schema is refused rather than misread.
    """
    where = f"{str(folder).rstrip('/')}/{MANIFEST}"
    try:
        values = json.loads(_read_bytes(where))
    except (FileNotFoundError, NotADirectoryError):
        raise LineageError(
            f"{folder} has no {MANIFEST}; give the folder of an artifact that a stage published"
        ) from None
    except (OSError, ValueError) as error:
        raise LineageError(f"can't read {where}: {error}") from error
    if isinstance(values, dict) and values.get("schema_version", 0) != SCHEMA_VERSION:
        raise LineageError(
            f"{where} has schema version {values.get('schema_version')!r}, this code reads "
            f"{SCHEMA_VERSION}; use the code that wrote it"
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise LineageError(f"{where} is not a manifest: {field}: {first['msg']}") from None


def verify(folder: str | Path) -> Manifest:
    """Re-hash a local artifact folder and return its manifest.

    Raises LineageError that names the first file which is missing, added, or differs.
    """
    manifest = read_manifest(folder)
    found = hash_files(folder)
    for name in sorted(manifest.files.keys() | found.keys()):
        if name not in found:
            raise LineageError(f"{folder}: {name} is in the manifest but not in the folder")
        if name not in manifest.files:
            raise LineageError(f"{folder}: {name} is in the folder but not in the manifest")
        if found[name] != manifest.files[name]:
            raise LineageError(
                f"{folder}: {name} differs from the manifest: {found[name].size} bytes of SHA-256 "
                f"{found[name].sha256[:12]}, recorded {manifest.files[name].size} bytes of "
                f"{manifest.files[name].sha256[:12]}"
            )
    for label, recorded, computed in (
        ("digest", manifest.digest, content_digest(found)),
        ("config_digest", manifest.config_digest, json_digest(manifest.config)),
    ):
        if recorded != computed:
            raise LineageError(
                f"{folder}/{MANIFEST}: {label} is {recorded[:12]} where its content gives "
                f"{computed[:12]}; the manifest was edited"
            )
    return manifest


def _read_bytes(where: str) -> bytes:
    if "://" not in where:
        return Path(where).read_bytes()
    import fsspec

    with fsspec.open(where, "rb") as file:
        return bytes(file.read())
