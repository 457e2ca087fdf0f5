"""The manifest of an artifact folder: what it holds, what made it, and what it came from.

What lives here: the model of `manifest.json`, writing, reading, and comparing it with its folder.
What does not: hashing (`.hashing`), where artifacts are kept (`.locations`), walking parents
(`engine.lineage`).

A manifest names its parents by the digest of their content and by that of their manifest.json, so
an edit of a manifest's own words (its parents, configuration or metrics) shows in its children. The
tip of a chain has no child: its manifest's digest is in the model registry, as the tag
`manifest_digest` of the version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from engine.errors import LineageError
from engine.redaction import redact, redact_values
from engine.storage.atomic import write_atomically
from engine.storage.code_version import code_version, sources_digest
from engine.storage.filesystem import read_file
from engine.storage.hashing import (
    MANIFEST,
    SHA256,
    FileEntry,
    content_digest,
    hash_files,
    require_inside,
)

SCHEMA_VERSION = 2
READABLE = (1, 2)  # 1 has no digests of the parents' manifests
NAME = r"^[a-z][a-z0-9_]*$"  # of a kind
SOURCE = "source"  # kind of data that was made elsewhere and has no manifest


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Parent(_Frozen):
    """What an artifact was made from."""

    name: str = Field(min_length=1, description="Its role, e.g. `warm_start`")
    # Both are parts of the path at which it is looked for.
    kind: str = Field(pattern=NAME, description="e.g. `sft`; `source` for data made elsewhere")
    digest: str = Field(pattern=r"^[^/\\]+$", description="Content digest, hex")
    uri: str = Field("", description="Folder or address; empty for what has none")
    manifest: str = Field("", description="SHA-256 of its manifest.json; empty for a source")


class Draft(_Frozen):
    """What a stage says of its artifact; `write_manifest` adds the rest."""

    kind: str = Field(pattern=NAME, description="e.g. dataset, sft, rl, evaluation")
    parents: tuple[Parent, ...] = ()
    config: dict[str, object] = Field(default_factory=dict, description="JSON values only")
    metrics: dict[str, float] = Field(default_factory=dict)
    flyte_execution: str = ""
    mlflow_run: str = ""

    @property
    def inputs_digest(self) -> str:
        """SHA-256 (hex) of what it was made by: kind, parents' content and roles, configuration."""
        parents = sorted((p.name, p.kind, p.digest) for p in self.parents)
        return json_digest({"kind": self.kind, "parents": parents, "config": self.config})

    def redacted(self) -> Self:
        """Return it without credentials in its configuration and in its parents' addresses."""
        parents = tuple(p.model_copy(update={"uri": redact(p.uri)}) for p in self.parents)
        config = redact_values(self.config)
        return self.model_copy(update={"config": config, "parents": parents})


class Manifest(Draft):
    """All of `manifest.json`."""

    schema_version: int = SCHEMA_VERSION
    digest: str = Field(pattern=SHA256, description="Content digest of all other files")
    files: dict[str, FileEntry] = Field(description="By path below the folder, with / inside")
    code_version: str
    sources_digest: str
    config_digest: str
    created_at: datetime
    _own_digest: str = PrivateAttr("")

    @property
    def own_digest(self) -> str:
        """SHA-256 (hex) of the bytes of manifest.json that it was read from or written to."""
        return self._own_digest

    def as_parent(self, name: str, uri: str | Path = "") -> Parent:
        """Return the reference that a child of this artifact writes into its own manifest."""
        return Parent(
            name=name, kind=self.kind, digest=self.digest, uri=str(uri), manifest=self.own_digest
        )


def json_digest(values: Mapping[str, object]) -> str:
    """Return the SHA-256 (hex) of JSON values, whatever the order of their keys.

    The same values give the same digest as `engine.config.digest` of the section they came from.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_manifest(folder: str | Path, draft: Draft) -> Manifest:
    """Hash a local `folder`, write its manifest.json in one step, and return it.

    What the draft says is written without credentials. Raises LineageError when the configuration
    is not JSON.
    """
    folder, draft = Path(folder), draft.redacted()
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
    data = (manifest.model_dump_json(indent=2) + "\n").encode()
    write_atomically(folder / MANIFEST, [data])
    manifest._own_digest = hashlib.sha256(data).hexdigest()
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a local or remote (`s3://…`) artifact folder; LineageError if it can't.

    A store that doesn't answer is a StorageError. A manifest of a newer schema is refused rather
    than misread.
    """
    where = f"{str(folder).rstrip('/')}/{MANIFEST}"
    try:
        data = read_file(where, LineageError)
    except FileNotFoundError:
        raise LineageError(
            f"{folder} has no {MANIFEST}; give the folder of an artifact that a stage published"
        ) from None
    return parse_manifest(data, where)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest of these bytes; LineageError, which names `where`, if they are none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LineageError(f"can't read {where}: {error}") from error
    if isinstance(values, dict) and values.get("schema_version", 0) not in READABLE:
        raise LineageError(
            f"{where} has schema version {values.get('schema_version')!r}, this code reads "
            f"{READABLE[0]} to {READABLE[-1]}; use the code that wrote it"
        )
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise LineageError(f"{where} is not a manifest: {field}: {first['msg']}") from None
    require_inside(manifest.files, where, LineageError)
    manifest._own_digest = hashlib.sha256(data).hexdigest()
    return manifest


def verify(folder: str | Path) -> Manifest:
    """Re-hash a local or remote artifact folder, where it is, and return its manifest.

    Raises LineageError that names the first file which is missing, added, or differs.
    """
    manifest = read_manifest(folder)
    for fault in differences(folder, manifest):
        raise LineageError(fault)
    return manifest


def differences(folder: str | Path, manifest: Manifest) -> list[str]:
    """Re-hash a folder; return a sentence for each thing that is not as its manifest says."""
    try:
        found = hash_files(folder)
    except LineageError as error:
        return [str(error)]
    faults = []
    for name in sorted(manifest.files.keys() | found.keys()):
        if name not in found:
            faults.append(f"{folder}: {name} is in the manifest but not in the folder")
        elif name not in manifest.files:
            faults.append(f"{folder}: {name} is in the folder but not in the manifest")
        elif found[name] != manifest.files[name]:
            faults.append(
                f"{folder}: {name} differs from the manifest: {found[name].size} bytes of SHA-256 "
                f"{found[name].sha256[:12]}, recorded {manifest.files[name].size} bytes of "
                f"{manifest.files[name].sha256[:12]}"
            )
    if faults:
        return faults
    try:
        config_digest = json_digest(manifest.config)
    except ValueError:
        return [f"{folder}/{MANIFEST}: config is not JSON; the manifest was edited"]
    for label, recorded, computed in (
        ("digest", manifest.digest, content_digest(found)),
        ("config_digest", manifest.config_digest, config_digest),
    ):
        if recorded != computed:
            faults.append(
                f"{folder}/{MANIFEST}: {label} is {recorded[:12]} where its content gives "
                f"{computed[:12]}; the manifest was edited"
            )
    return faults
