"""Artifact folders and their manifests: written whole or not at all, named by content.

`home()/artifacts/<kind>/<16 hex digits>/` holds published artifacts and copies of those in the
shared store, `.staging/` those being written, `.cache/` copies of other addresses.

A manifest, which is written last, names its parents by the digest of their content and by that of
their manifest.json, so an edit of a manifest's own words shows in its children, or in the tag
`manifest_digest` of a model's version.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from engine.errors import LineageError, StorageError
from engine.redaction import redact, redact_values
from engine.storage import digests, filesystem, signatures
from engine.storage.digests import MANIFEST, FileEntry
from engine.storage.s3 import Objects, download, upload
from engine.storage.signatures import Signature

SCHEMA_VERSION = 3
READABLE = (1, 2, 3)  # 1 has no digests of the parents' manifests, 2 no signature
NAME = r"^[a-z][a-z0-9_]*$"  # of a kind
SOURCE = "source"  # kind of data that was made elsewhere and has no manifest


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Parent(_Frozen):
    """One input of an artifact."""

    name: str = Field(min_length=1, description="Its role, e.g. `warm_start`")
    # Both are parts of the path at which it is looked for.
    kind: str = Field(pattern=NAME, description="e.g. `sft`; `source` for data made elsewhere")
    digest: str = Field(pattern=r"^[^/\\]+$", description="Content digest, hex")
    uri: str = Field("", description="Folder or address; empty for what has none")
    manifest: str = Field("", description="SHA-256 of its manifest.json; empty for a source")


class Draft(_Frozen):
    """The part of a manifest that a stage knows; `write_manifest` adds the rest."""

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
    digest: str = Field(pattern=digests.SHA256, description="Content digest of all other files")
    files: dict[str, FileEntry] = Field(description="By path below the folder, with / inside")
    code_version: str
    sources_digest: str
    config_digest: str
    created_at: datetime
    signed: Signature | None = Field(None, description="Of all else, by who published it")
    _own_digest: str = PrivateAttr("")

    @property
    def own_digest(self) -> str:
        """SHA-256 (hex) of the bytes of manifest.json that it was read from or written to."""
        return self._own_digest

    @property
    def signed_content(self) -> bytes:
        """The bytes that its signature is of: its other fields, as JSON with sorted keys."""
        values = self.model_dump(mode="json", exclude={"signed"})
        return json.dumps(values, sort_keys=True).encode()

    def signature_fault(self, trusted: Collection[str] | None) -> str:
        """Say what its signature's fault is, or "". trusted: keys (hex); None: unsigned will do."""
        name = f"{self.kind} {self.digest[:12]}"
        if self.signed is None:
            if trusted is None:
                return ""
            return f"{name} is not signed; make it again with a key ({signatures.SIGNING_VARIABLE})"
        key = self.signed.key[:12]
        if not self.signed.holds(self.signed_content):
            return f"{name} is not as the key {key} signed it; the manifest was edited"
        if trusted is not None and self.signed.key not in trusted:
            return f"{name} is signed by the key {key}, which does not count here"
        return ""

    def as_parent(self, name: str, uri: str | Path = "") -> Parent:
        """Return the reference that a child of this artifact writes into its own manifest."""
        return Parent(
            name=name, kind=self.kind, digest=self.digest, uri=str(uri), manifest=self.own_digest
        )


def json_digest(values: Mapping[str, object]) -> str:
    """SHA-256 (hex) of JSON values as `engine.config.text.digest`, whatever their keys' order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()


def write_manifest(folder: str | Path, draft: Draft) -> Manifest:
    """Write a local folder's manifest.json, without credentials; LineageError for a bad config."""
    folder, draft = Path(folder), draft.redacted()
    files = digests.hash_files(folder)
    try:
        config_digest = json_digest(draft.config)
    except (TypeError, ValueError) as error:
        raise LineageError(f"config of the {draft.kind} artifact is not JSON: {error}") from None
    manifest = Manifest(
        **dict(draft),
        digest=digests.content_digest(files),
        files=files,
        code_version=digests.code_version(),
        sources_digest=digests.sources_digest(),
        config_digest=config_digest,
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    signature = signatures.sign(manifest.signed_content)
    manifest = manifest.model_copy(update={"signed": signature})
    data = (manifest.model_dump_json(indent=2) + "\n").encode()
    filesystem.write_atomically(folder / MANIFEST, [data])
    manifest._own_digest = hashlib.sha256(data).hexdigest()
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read an artifact folder's manifest; LineageError, or StorageError for no answer."""
    where = f"{str(folder).rstrip('/')}/{MANIFEST}"
    try:
        data = filesystem.read_file(where, LineageError)
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
    digests.require_inside(manifest.files, where, LineageError)
    manifest._own_digest = hashlib.sha256(data).hexdigest()
    return manifest


def verify(folder: str | Path) -> Manifest:
    """Re-hash an artifact folder where it is; LineageError names the first fault."""
    manifest = read_manifest(folder)
    for fault in differences(folder, manifest):
        raise LineageError(fault)
    return manifest


def differences(folder: str | Path, manifest: Manifest) -> list[str]:
    """Re-hash a folder; return a sentence for each thing that is not as its manifest says."""
    try:
        present = digests.hash_files(folder)
    except LineageError as error:
        return [str(error)]
    faults = []
    for name in sorted(manifest.files.keys() | present.keys()):
        if name not in present:
            faults.append(f"{folder}: {name} is in the manifest but not in the folder")
        elif name not in manifest.files:
            faults.append(f"{folder}: {name} is in the folder but not in the manifest")
        elif (entry := present[name]) != (expected := manifest.files[name]):
            faults.append(
                f"{folder}: {name} differs from the manifest: {entry.size} bytes of SHA-256 "
                f"{entry.sha256[:12]}, recorded {expected.size} bytes of {expected.sha256[:12]}"
            )
    if faults:
        return faults
    try:
        content, config = digests.content_digest(present), json_digest(manifest.config)
    except ValueError:
        return [f"{folder}/{MANIFEST}: config is not JSON; the manifest was edited"]
    return [
        f"{folder}/{MANIFEST}: {label} is {recorded[:12]} where its content gives {digest[:12]}; "
        "the manifest was edited"
        for label, digest in (("digest", content), ("config_digest", config))
        if digest != (recorded := getattr(manifest, label))
    ]


RERUN_HINT = "run again with --overwrite-cache (or `make clean-cache`)"


@contextlib.contextmanager
def staging(kind: str) -> Iterator[Path]:
    """Yield a fresh folder for `publish`; what is left is removed. StorageError for a full disk."""
    root = filesystem.home() / ".staging"
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

    An equal and whole artifact there is kept; where equal content was made from something else,
    this one's name gets a suffix. It goes to the shared store as well. Raises StorageError for an
    empty folder or when disk or store refuses.
    """
    folder = Path(folder)
    if not any(path.is_file() for path in folder.rglob("*")):
        raise StorageError(f"artifact folder {folder} has no files; nothing to publish")
    with _writing(folder):
        manifest = write_manifest(folder, draft)
        filesystem.fsync_tree(folder)
        target = _target_of(manifest)
        _move_into_place(folder, target, manifest)
    share(target)
    return target


def share(folder: str | Path) -> str:
    """Put a published artifact into the shared store; return the address that children name.

    Its path where there is no store, or it is no artifact of this machine's. An equal artifact
    there keeps its manifest, which becomes this machine's. StorageError when another is there.
    """
    folder, uri = Path(folder), filesystem.shared_address(folder)
    if uri == str(folder):
        return uri
    data = (folder / MANIFEST).read_bytes()
    manifest = parse_manifest(data, str(folder))
    objects = Objects(uri, filesystem.QUICK)
    published = _published_manifest(objects, manifest)
    upload(folder, uri, manifest.files, f"upload {manifest.kind} {manifest.digest[:12]}")
    if published is None and not objects.put(MANIFEST, data, only_if=""):
        # Another process has published the same since: whose manifest was first counts for both.
        published = _published_manifest(objects, manifest)
    if published is not None and published != data:
        with _writing(folder):
            filesystem.write_atomically(folder / MANIFEST, [published])
    return uri


def _published_manifest(objects: Objects, manifest: Manifest) -> bytes | None:
    """The manifest that is there, None where there is none. StorageError for another artifact's."""
    try:
        data = objects.read(MANIFEST)
    except FileNotFoundError:
        return None
    try:
        published = parse_manifest(data, f"{objects.uri}/{MANIFEST}")
    except LineageError as error:
        raise StorageError(f"{error}; remove it, and publish again") from error
    if published.files != manifest.files or published.inputs_digest != manifest.inputs_digest:
        raise StorageError(
            f"{objects.uri} holds another artifact ({published.kind} {published.digest[:12]}, made "
            f"{published.created_at:%Y-%m-%d %H:%M}); it stays as it is; publish again, and if it "
            f"still stands there, see `python -m engine.lineage verify {objects.uri}`"
        )
    return data


def local_path(uri: str | Path) -> Path:
    """Return a local path with the content of `uri`: a path, file://, or anything fsspec reads.

    A remote folder is downloaded once, and checked. Raises StorageError when nothing whole is there
    or the download fails, LineageError for damage.
    """
    if filesystem.is_remote(os.fspath(uri)):
        return _download(os.fspath(uri).rstrip("/"))
    path = filesystem.as_path(uri).absolute()
    if not path.exists():
        raise StorageError(f"artifact {path} was deleted or never written; {RERUN_HINT}")
    return path


def _download(uri: str) -> Path:
    key = hashlib.sha256(uri.encode()).hexdigest()[:16]
    cached = filesystem.home() / ".cache" / key / uri.rsplit("/", 1)[-1]
    target = filesystem.local_copy_path(uri) or cached
    try:
        with filesystem.translated(uri, StorageError, "download", keep=(FileNotFoundError,)):
            files = filesystem.Files(uri)
            manifest: bytes | None = None
            with contextlib.suppress(FileNotFoundError):
                manifest = files.read(MANIFEST)
            if manifest is None and filesystem.is_artifact_address(uri):
                raise StorageError(
                    f"artifact {uri} was deleted or never written whole; {RERUN_HINT}"
                )
            if manifest is not None and _is_copy(target, manifest):
                return target
            with staging("download") as folder:
                draft = folder / target.name
                if manifest is not None and files.is_s3:
                    parsed = parse_manifest(manifest, f"{uri}/{MANIFEST}")
                    label = f"download {parsed.kind} {parsed.digest[:12]}"
                    draft.mkdir(parents=True)
                    download(uri, draft, parsed.files, label)
                    (draft / MANIFEST).write_bytes(manifest)
                else:
                    files.request(lambda: files.fs.get(files.path, str(draft), recursive=True))
                if (draft / MANIFEST).is_file():
                    verify(draft)
                filesystem.fsync_tree(draft)
                if not target.exists():
                    _rename(draft, target)
                elif not _is_equal(target, draft, manifest):  # else a process may be reading it
                    _replace(draft, target)
    except FileNotFoundError:
        raise StorageError(f"artifact {uri} was deleted or never written; {RERUN_HINT}") from None
    return target


def _is_equal(target: Path, draft: Path, manifest: bytes | None) -> bool:
    if manifest is not None:
        return _is_copy(target, manifest)
    with contextlib.suppress(LineageError, OSError):
        present, downloaded = (
            digests.hash_file(p) if p.is_file() else digests.tree_digest(p) for p in (target, draft)
        )
        return present == downloaded
    return False


def _is_copy(target: Path, manifest: bytes) -> bool:
    """Tell whether a local copy has these bytes as its manifest, and is as that says."""
    with contextlib.suppress(LineageError, OSError):
        return (target / MANIFEST).read_bytes() == manifest and bool(verify(target))
    return False


def _target_of(manifest: Manifest) -> Path:
    """Return where an artifact goes: named by content, and by its making where two have that."""
    target = filesystem.artifact_path(manifest.kind, manifest.digest)
    for where in dict.fromkeys((str(target), filesystem.shared_address(target))):
        try:
            existing = read_manifest(where)
        except (LineageError, StorageError):
            # Nothing there, or nothing whole, which is replaced; or the store is away, which
            # `share` says once the artifact is safe on the disk.
            continue
        if existing.digest != manifest.digest:
            continue
        made_by = manifest.inputs_digest
        if manifest.signed and existing.signature_fault({manifest.signed.key}):
            # It does not give way to one that its key did not sign.
            made_by = json_digest({"inputs": made_by, "key": manifest.signed.key})
        elif existing.inputs_digest == made_by:
            continue
        return target.with_name(f"{target.name}-{made_by[:8]}")
    return target


def _move_into_place(folder: Path, target: Path, manifest: Manifest) -> None:
    """Rename `folder` to `target`, giving way to an equal and whole artifact already there."""
    if not target.exists():
        _rename(folder, target)
        return
    with contextlib.suppress(LineageError):
        if verify(target).digest == manifest.digest:
            shutil.rmtree(folder)
            return
    # One whose files were damaged gets them back; its manifest stays, because children know it.
    with contextlib.suppress(LineageError):
        if read_manifest(target).files == manifest.files:
            shutil.copyfile(target / MANIFEST, folder / MANIFEST)
            filesystem.fsync(folder / MANIFEST)
    _replace(folder, target)


def _replace(folder: Path, target: Path) -> None:
    """Put `folder` where `target` is, which is removed."""
    replaced = filesystem.home() / ".staging" / f"replaced-{_owner()}-{uuid.uuid4().hex[:8]}"
    replaced.parent.mkdir(parents=True, exist_ok=True)
    filesystem.replace_folder(folder, target, replaced)


def _rename(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; where another process was first, its folder stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not filesystem.move_folder(folder, target):
        # Another process put the same content there between the check and the rename.
        shutil.rmtree(folder)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(error, path) from error


def _unwritable(error: Exception, path: Path) -> StorageError:
    where = getattr(error, "filename", None) or path
    what = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if _says_disk_full(error):
        what = "no space left on the disk"
        way_out = f"free some, or set {filesystem.HOME_VARIABLE} to a folder on another disk"
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        way_out = f"make it writable, or set {filesystem.HOME_VARIABLE} to a folder that is"
    else:
        way_out = f"check the disk, or set {filesystem.HOME_VARIABLE} to a folder on another one"
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
    host = _owner().rsplit("-", 1)[0]
    for folder in root.glob("*-*-*-*") if root.is_dir() else ():
        _, owner_host, pid, _ = folder.name.rsplit("-", 3)
        if owner_host == host and pid.isdigit() and not filesystem.process_is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
