"""Model versions, their aliases and their files in MLflow's registry.

A version is a folder logged to a run, whatever is inside, with tags that lead back to the artifact
it came from. `engine.promotion` decides when an alias moves, and that two don't move it at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.errors import LineageError, StorageError, TrackingError
from engine.storage.artifacts import Parent, differences, parse_manifest
from engine.storage.digests import MANIFEST, tree_digest
from engine.storage.filesystem import read_file, shared_address
from engine.tracking import connection
from engine.tracking.connection import Connection

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion as MlflowVersion
    from mlflow.entities.model_registry import RegisteredModel
    from mlflow.store.entities import PagedList


T = TypeVar("T")

ARTIFACT_TAG = "artifact_digest"
MANIFEST_TAG = "manifest_digest"
MODELS_FOLDER = "models"
READY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One registered version."""

    name: str  # e.g. "hybridflyte-policy"
    version: str  # e.g. "3"
    run_id: str  # the run that holds its files
    source: str  # where MLflow keeps its files
    tags: dict[str, str]  # artifact_uri, artifact_digest, …
    aliases: tuple[str, ...]  # e.g. ("champion",)

    @staticmethod
    def of(entry: MlflowVersion, aliases: Iterable[str] | None = None) -> ModelVersion:
        """Return the version that MLflow found; `aliases` where its answer leaves them out."""
        names = tuple(entry.aliases if aliases is None else aliases)
        run_id, source = entry.run_id or "", entry.source or ""
        return ModelVersion(entry.name, str(entry.version), run_id, source, dict(entry.tags), names)


def version_parent(version: ModelVersion, name: str) -> Parent | None:
    """Return the artifact that a version was registered from, as a parent; None without tags."""
    tags = version.tags
    if not tags.get(ARTIFACT_TAG):
        return None
    kind, digest = tags.get("artifact_kind") or "model", tags[ARTIFACT_TAG]
    uri, manifest = tags.get("artifact_uri", ""), tags.get(MANIFEST_TAG, "")
    return Parent(name=name, kind=kind, digest=digest, uri=uri, manifest=manifest)


class ModelRegistry(Connection):
    """A registry that models are registered in, named by and fetched from."""

    def register_model(
        self,
        folder: str | Path,
        model_name: str,
        run_id: str,
        tags: Mapping[str, object] | None = None,
    ) -> str:
        """Log `folder` to a run and make it a version of `model_name`; return the version.

        A folder with a manifest is checked first; its tags name the artifact and its place.
        If that content is a version already, its number is returned and nothing is written.
        """
        folder = Path(folder).absolute()
        if not folder.is_dir():
            raise StorageError(f"model folder {folder} does not exist; give a published artifact")
        content, faults = _facts(folder)
        for fault in faults:
            raise LineageError(fault)
        facts = {"artifact_uri": shared_address(folder), **content}
        # Named by content, so that two models logged to one run keep apart.
        artifact_path = f"{MODELS_FOLDER}/{facts[ARTIFACT_TAG][:16]}"
        with self.translated("register the model"):
            existing = self._version_of(model_name, facts[ARTIFACT_TAG])
            if existing is not None:
                return existing
            self.client.log_artifacts(run_id, str(folder), artifact_path)
            root = self.client.get_run(run_id).info.artifact_uri.rstrip("/")
            with tolerated("RESOURCE_ALREADY_EXISTS"):
                self.client.create_registered_model(model_name)
            version = self.client.create_model_version(
                model_name,
                f"{root}/{artifact_path}",
                run_id=run_id,
                tags=connection.tags(facts | dict(tags or {})),
                await_creation_for=READY_SECONDS,
            )
            # Of two that register it at once, the later version goes away again.
            first = self._version_of(model_name, facts[ARTIFACT_TAG])
            if first is not None and int(first) < int(version.version):
                self.client.delete_model_version(model_name, str(version.version))
                return first
        return str(version.version)

    def champion(self, model_name: str, alias: str = "champion") -> ModelVersion | None:
        """The version under an alias, None without such a model or alias; else TrackingError."""
        with self.translated("look up a model"):
            model = self.find_model(model_name)
            if model is None or alias not in model.aliases:
                return None
            version = str(model.aliases[alias])
            return ModelVersion.of(self.client.get_model_version(model_name, version))

    def model_version(self, reference: str) -> ModelVersion:
        """Return what `models:/NAME@ALIAS` or `models:/NAME/VERSION` means; else TrackingError."""
        parts = re.fullmatch(r"(.+)@([^@]+)|(.+)/(\d+)", reference.removeprefix("models:/"))
        if parts is None:
            raise TrackingError(
                f"{reference!r} is no model reference; write models:/NAME@ALIAS or "
                "models:/NAME/VERSION"
            )
        if parts[1] and (champion := self.champion(parts[1], parts[2])):
            return champion
        with self.translated("look up a model"):
            for entry in self._versions(parts[3]) if parts[3] else ():
                if str(entry.version) == parts[4]:
                    return ModelVersion.of(entry)
        raise TrackingError(f"MLflow {self.uri} has no {reference}; check the name")

    def set_alias(self, model_name: str, alias: str, version: str, expected: str | None) -> None:
        """Move `alias`; TrackingError unless it points to `expected` (None: nowhere).

        Two callers at once need a lock, as `engine.promotion.champions` has.
        """
        current = self.champion(model_name, alias)
        at = current.version if current else None
        if at != expected:
            raise TrackingError(
                f"alias {alias!r} of {model_name!r} is on version {at} where {expected} was "
                "compared with; evaluate against the present one and promote again"
            )
        with self.translated("move an alias"):
            self.client.set_registered_model_alias(model_name, alias, version)

    def download_model(self, version: ModelVersion, dest: str | Path) -> Path:
        """Fetch a version's files to `dest`, which must not exist, whole and checked."""
        dest = Path(dest).absolute()
        if dest.exists():
            raise StorageError(f"{dest} is already there; choose another folder for the model")
        dest.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as draft:
            folder = self.download_files(version.name, version.version, draft)
            require_tagged_content(folder, version)
            os.rename(folder, dest)
        return dest

    def download_files(self, model_name: str, version: str, folder: str | Path) -> Path:
        """Fetch a version's files, as they are, to below `folder`; return where they are."""
        from mlflow.artifacts import download_artifacts

        with self.translated("download a model"):
            # MLflow 3 would look up a models:/ address in its global store, not in this one.
            files = self.client.get_model_version_download_uri(model_name, version)
            return Path(download_artifacts(files, dst_path=str(folder), tracking_uri=self.uri))

    def find_model(self, model_name: str) -> RegisteredModel | None:
        """Return MLflow's registered model, None when there is none of that name."""
        with tolerated("RESOURCE_DOES_NOT_EXIST"):
            return self.client.get_registered_model(model_name)
        return None

    def require_model(self, model_name: str) -> RegisteredModel:
        """Return MLflow's registered model; TrackingError when there is none of that name."""
        with self.translated("look up a model"):
            model = self.find_model(model_name)
        if model is None:
            raise TrackingError(f"MLflow {self.uri} has no model {model_name!r}; check the name")
        return model

    def set_model_tag(self, model_name: str, key: str, value: str) -> None:
        """Set a tag of a registered model."""
        with self.translated("tag a model"):
            self.client.set_registered_model_tag(model_name, key, value)

    def delete_model_tag(self, model_name: str, key: str) -> None:
        """Delete a tag of a registered model; it may be gone already."""
        with self.translated("delete a model's tag"), tolerated("RESOURCE_DOES_NOT_EXIST"):
            self.client.delete_registered_model_tag(model_name, key)

    def _versions(self, model_name: str) -> Iterable[MlflowVersion]:
        quoted = model_name.replace("'", "''")
        return self.client.search_model_versions(f"name='{quoted}'")

    def _version_of(self, model_name: str, digest: str) -> str | None:
        """Return the first version that holds this content, if one does."""
        versions = self._versions(model_name)
        same = [int(v.version) for v in versions if v.tags.get(ARTIFACT_TAG) == digest]
        return str(min(same)) if same else None


@contextlib.contextmanager
def tolerated(code: str) -> Iterator[None]:
    """Let MLflow's error of this code pass in silence."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def require_tagged_content(folder: Path, version: ModelVersion) -> None:
    """Re-hash the files of a version; LineageError unless they are what its tags name."""
    for fault in copy_faults(folder, version):
        raise LineageError(f"{fault}; restore its files, or choose another version")


def copy_faults(copy: str | Path, version: ModelVersion) -> list[str]:
    """Re-hash a version's files; return a sentence for each difference from manifest and tags."""
    what = f"MLflow's copy of {version.name} version {version.version}"
    try:
        facts, faults = _facts(copy)
    except LineageError as error:
        return [f"{what} is damaged: {error}"]
    faults = [f"{what} is damaged: {fault}" for fault in faults]
    for tag in (ARTIFACT_TAG, MANIFEST_TAG) if version.tags.get(ARTIFACT_TAG) else ():
        expected, actual = version.tags.get(tag, ""), facts.get(tag, "")
        if expected != actual:
            faults.append(
                f"{what} is {actual[:12] or 'nothing'} where its tag {tag} says "
                f"{expected[:12] or 'nothing'}"
            )
    return faults


def _facts(folder: str | Path) -> tuple[dict[str, str], list[str]]:
    """Return the tags that name a folder's content, and what differs from its manifest."""
    where = f"{folder}/{MANIFEST}"
    try:
        manifest = parse_manifest(read_file(where, LineageError), where)
    except FileNotFoundError:
        return {ARTIFACT_TAG: tree_digest(folder)}, []
    digests = {ARTIFACT_TAG: manifest.digest, MANIFEST_TAG: manifest.own_digest}
    return digests | {"artifact_kind": manifest.kind}, differences(folder, manifest)


def all_pages(search: Callable[[str | None], PagedList[T]]) -> Iterator[T]:
    """Yield all that a search of MLflow finds, which is called with the token of each page."""
    page = search(None)
    yield from page
    while page.token:
        page = search(page.token)
        yield from page


def intact_copy(registry: ModelRegistry, version: ModelVersion, scratch: Path) -> Path:
    """Return a folder with a version's files, re-hashed: MLflow's own, or a download in `scratch`.

    Raises LineageError for a version without tags or with other content than they name, and
    TrackingError where MLflow doesn't answer.
    """
    if not version.tags.get(ARTIFACT_TAG):
        raise LineageError(
            f"{version.name} version {version.version} has no tag {ARTIFACT_TAG} to hold its "
            "files against; register the model through engine.tracking, or choose another version"
        )
    source = Path(version.source.removeprefix("file://"))
    if source.is_absolute() and source.is_dir():
        require_tagged_content(source, version)
        return source
    return registry.download_model(version, scratch / "model")
