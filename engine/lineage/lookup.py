"""From what a person names to the graph around it: the entry point of this package.

Checks of what is found are in `audit`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from engine.errors import CheckpointError, LineageError, StorageError, TrackingError
from engine.lineage.graph import (
    CHECKPOINT,
    MODEL_VERSION,
    ArtifactNode,
    Graph,
    GraphBuilder,
    Index,
    StoredArtifact,
    artifact_node,
    default_roots,
    scan,
    source_node,
)
from engine.storage.artifacts import SOURCE, Draft, Manifest, Parent, read_manifest
from engine.storage.digests import MANIFEST, code_version, hash_file, sources_digest, tree_digest
from engine.storage.filesystem import Files, as_path, is_remote, read_file, translated
from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG, ModelVersion, all_pages

if TYPE_CHECKING:
    from engine.tracking import Tracker


# What a folder of checkpoints is being made from: `origin.json`, before there is an artifact.
#
# A stage that is cut off leaves checkpoints and no manifest; this file says whose they are.

ORIGIN = "origin.json"


class Origin(Draft):
    """All of `origin.json`."""

    code_version: str
    sources_digest: str
    created_at: datetime


def write_origin(folder: str | Path, draft: Draft) -> Origin:
    """Write `origin.json` into a local or remote folder of checkpoints, which is made if need be.

    Raises LineageError when it can't be written, StorageError when a store doesn't answer.
    """
    origin = Origin(
        **dict(draft.redacted()),
        code_version=code_version(),
        sources_digest=sources_digest(),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    data = (origin.model_dump_json(indent=2) + "\n").encode()
    with translated(f"{folder}/{ORIGIN}", LineageError, "write"):
        Files(folder).write(ORIGIN, data)
    return origin


def read_origin(folder: str) -> Origin | None:
    """Read the origin of a folder of checkpoints; None where none was written."""
    where = f"{folder.rstrip('/')}/{ORIGIN}"
    try:
        return Origin.model_validate_json(read_file(where, LineageError))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise LineageError(f"{where} is not readable: {error.errors()[0]['msg']}") from None


# What MLflow knows of artifacts: model versions made of them, and digests of their manifests.
#
# Reads only. MLflow is imported when it is first asked, because that takes two seconds.

PREFIX = "models:/"
PAGE = 1000
MODELS = 100  # the most that MLflow returns at once


def open_registry(needed: bool) -> Tracker | None:
    """Return the tracking store of this machine's settings.

    None where nothing was set up (no MLFLOW_TRACKING_URI and no ./mlflow.db), unless it is
    `needed`: looking at lineage must not create a store.
    """
    from engine.tracking import Tracker
    from engine.tracking.connection import URI_VARIABLE, default_uri

    tracker = Tracker(default_uri())
    if tracker.database is not None and not tracker.database.is_file():
        if needed:
            raise TrackingError(
                f"there is no MLflow store at {tracker.uri}; set {URI_VARIABLE} to the one that "
                "holds the model"
            )
        return None
    return tracker


def version_node(version: ModelVersion) -> ArtifactNode:
    """Return the node of a model version; its facts are its tags."""
    facts = {**version.tags, "run_id": version.run_id}
    if version.aliases:
        facts["aliases"] = ", ".join(version.aliases)
    return ArtifactNode(
        key=f"{MODEL_VERSION}:{version.name}:{version.version}",
        kind=MODEL_VERSION,
        digest=version.tags.get(ARTIFACT_TAG, ""),
        uri=version.source.removeprefix("file://"),
        label=f"{version.name} version {version.version}",
        facts=facts,
    )


def version_parent(node: ArtifactNode) -> Parent:
    """Return the artifact that a model version was registered from, by the version's tags."""
    if not node.digest:
        raise LineageError(
            f"{node.label} has no tag {ARTIFACT_TAG}; register models through engine.tracking, or "
            "give the artifact's folder"
        )
    return Parent(
        name="artifact",
        kind=node.facts.get("artifact_kind") or "model",
        digest=node.digest,
        uri=node.facts.get("artifact_uri", ""),
        manifest=node.facts.get(MANIFEST_TAG, ""),
    )


def all_versions(tracker: Tracker) -> list[ArtifactNode]:
    """Return the nodes of all model versions that lead back to an artifact."""
    client = tracker.client
    with tracker.translated("list the model versions"):
        aliases = _aliases(tracker)
        versions = [
            ModelVersion.of(found, aliases.get((found.name, str(found.version)), ()))
            for found in all_pages(
                lambda token: client.search_model_versions(max_results=PAGE, page_token=token)
            )
        ]
    return [node for node in map(version_node, versions) if node.digest]


def _aliases(tracker: Tracker) -> dict[tuple[str, str], list[str]]:
    """Return the aliases of each model version; a search of versions leaves them out."""
    client = tracker.client
    found: dict[tuple[str, str], list[str]] = {}
    for model in all_pages(
        lambda token: client.search_registered_models(max_results=MODELS, page_token=token)
    ):
        for alias, version in model.aliases.items():
            found.setdefault((model.name, str(version)), []).append(alias)
    return found


def recorded_manifests(tracker: Tracker, digest: str) -> set[str]:
    """Return the digests of manifests that runs have recorded for an artifact's content."""
    with tracker.translated("look up the run of an artifact"):
        experiments = [e.experiment_id for e in tracker.client.search_experiments()]
        clause = f"tags.`{ARTIFACT_TAG}` = '{digest}'"
        runs = tracker.client.search_runs(experiments, clause, max_results=PAGE)
    return {run.data.tags[MANIFEST_TAG] for run in runs if MANIFEST_TAG in run.data.tags}


def is_reference(text: str) -> bool:
    """Tell `models:/NAME@ALIAS` and `models:/NAME/VERSION` from other addresses."""
    return text.startswith(PREFIX)


# From what a person names to the graph around it: the entry point of this package.
#
# A reference is a folder or address of an artifact, a checkpoint, a file or folder that artifacts
# were made from, the first hex digits of a digest, or a model version `models:/NAME@ALIAS`.

DIGITS = re.compile(r"[0-9a-f]{8,64}")
CHECKPOINT_MARKER = "COMPLETE"


@dataclass
class Review:
    """A graph, and what else is needed to judge it."""

    graph: Graph
    index: Index
    tracker: Tracker | None
    versions: tuple[ArtifactNode, ...] = ()  # all model versions of the registry
    notes: list[str] = field(default_factory=list)  # what could not be looked at, and why

    @property
    def starts(self) -> list[ArtifactNode]:
        """The nodes that were asked about, in order."""
        return [self.graph.nodes[key] for key in self.graph.focus]

    @property
    def summary(self) -> str:
        """How many nodes of which kinds there are, e.g. "3 nodes: 1 dataset, 2 rl"."""
        kinds = Counter(node.kind.replace("_", " ") for node in self.graph.nodes.values())
        parts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        number = kinds.total()
        return f"{number} {'node' if number == 1 else 'nodes'}: {parts}"


def review(
    references: Sequence[str],
    stores: Sequence[str] = (),
    *,
    registry: bool = True,
    descendants: bool = True,
) -> Review:
    """Return the graph around each of `references`; without any, of all that the stores hold.

    stores: folders or s3:// prefixes to search for descendants and moved parents; without any, the
    store that an artifact lies in and this machine's. registry: ask MLflow for model versions.
    Raises LineageError, TrackingError or CheckpointError for what can't be found or read, and
    StorageError when a store doesn't answer.
    """
    tracker = open_registry(needed=False) if registry else None
    starts = [_locate(reference, registry) for reference in references]
    roots = list(stores) or _roots(starts)
    index = scan(roots)
    notes: list[str] = []
    versions, tracker = _versions(tracker, notes)
    builder = GraphBuilder(index, versions)
    for start in starts:
        node, parents = _resolve(start, index)
        builder.walk(node, parents, descendants)
    if not references:
        for place in index.artifacts:
            builder.walk(artifact_node(place), descendants=False)
        builder.graph.focus = ()
    notes += [f"not searched: {fault}" for fault in index.unreadable] if references else []
    return Review(builder.graph, index, tracker, versions, notes)


@dataclass(frozen=True, slots=True)
class _Start:
    """A reference as far as it is known without an index."""

    reference: str
    node: ArtifactNode | None = None
    parents: tuple[Parent, ...] = ()


def _locate(reference: str, registry: bool) -> _Start:
    """Recognise what a reference names; one that only an index can tell has no node yet."""
    if is_reference(reference):
        if not registry:
            raise LineageError(f"{reference} is in MLflow's registry; ask without --no-registry")
        tracker = open_registry(needed=True)
        assert tracker is not None
        node = version_node(tracker.model_version(reference))
        return _Start(reference, node, (version_parent(node),))
    address = reference.rstrip("/").removesuffix(f"/{MANIFEST}")
    if not is_remote(address):
        if DIGITS.fullmatch(address) and not as_path(address).exists():
            return _Start(reference)
        address = os.path.abspath(as_path(address))
    manifest = _manifest_at(address)
    if manifest is not None:
        return _Start(reference, artifact_node(StoredArtifact(address, manifest)))
    checkpoint = _checkpoint_at(address)
    if checkpoint is not None:
        return _Start(reference, checkpoint)
    return _Start(reference, _source_at(address))


def _manifest_at(address: str) -> Manifest | None:
    """Return the manifest of a folder; None where it has none."""
    try:
        read_file(f"{address}/{MANIFEST}", LineageError)
    except FileNotFoundError:
        return None
    return read_manifest(address)


def _checkpoint_at(address: str) -> ArtifactNode | None:
    """Return the node of a complete checkpoint with what its stage was making; else None."""
    from engine.checkpoint.format import read_marker
    from engine.storage.folder import Folder

    try:
        read_file(f"{address}/{CHECKPOINT_MARKER}", LineageError)
        marker = read_marker(Folder(address))
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except CheckpointError as error:
        raise LineageError(str(error)) from error
    origin = read_origin(address.rpartition("/")[0])
    facts = {"step": str(marker.step), "sequence": str(marker.sequence)}
    facts |= {name: f"{value:.6g}" for name, value in marker.metrics.items()}
    label = f"checkpoint of step {marker.step}"
    if origin is not None:
        facts |= {
            "stage": origin.kind,
            "code_version": origin.code_version,
            "sources_digest": origin.sources_digest,
            "flyte_execution": origin.flyte_execution,
            "mlflow_run": origin.mlflow_run,
        }
        label = f"{origin.kind} {label}"
    key = f"{CHECKPOINT}:{marker.checksums}"
    return ArtifactNode(
        key, CHECKPOINT, marker.checksums, address, label, origin=origin, facts=facts
    )


def _source_at(address: str) -> ArtifactNode | None:
    """Return the node of a local file or folder; None for one that is remote or not there."""
    if is_remote(address) or not as_path(address).exists():
        return None
    path = as_path(address)
    try:
        digest = hash_file(path) if path.is_file() else tree_digest(path)
    except OSError as error:
        raise LineageError(f"can't read {path}: {error.strerror or error}") from error
    return source_node(Parent(name=path.name, kind=SOURCE, digest=digest, uri=str(path)))


def _roots(starts: Iterable[_Start]) -> list[str]:
    """Return the stores to search when none was named."""
    roots: dict[str, None] = {}
    for start in starts:
        is_version = bool(start.parents)  # whose own files lie in MLflow's store, not in ours
        places = [start.node.uri] if start.node and not is_version else []
        places += [parent.uri for parent in start.parents]
        for place in places or [""]:
            roots.update(dict.fromkeys(default_roots(place)))
    return list(roots or dict.fromkeys(default_roots()))


def _resolve(start: _Start, index: Index) -> tuple[ArtifactNode, tuple[Parent, ...]]:
    """Find a reference in the index; LineageError for one that names nothing."""
    where = ", ".join(index.roots) or "no store; name one with --store"
    if start.node is None:
        found = index.with_prefix(start.reference) if DIGITS.fullmatch(start.reference) else []
        if len(found) == 1:
            return artifact_node(found[0]), ()
        if found:
            names = ", ".join(f"{p.manifest.kind} {p.manifest.digest[:16]}" for p in found)
            raise LineageError(f"{start.reference} is ambiguous: {names}; give more digits")
        if DIGITS.fullmatch(start.reference):
            raise LineageError(f"no artifact's digest begins with {start.reference} in {where}")
        raise LineageError(
            f"{start.reference} has no {MANIFEST}; give the folder of an artifact that a stage "
            "published, a checkpoint, a source file, or models:/NAME@ALIAS"
        )
    if start.node.kind == SOURCE and not index.made_from(start.node.digest):
        raise LineageError(
            f"{start.reference} has no {MANIFEST}, and no artifact was made from it in {where}"
        )
    return start.node, start.parents


def _versions(
    tracker: Tracker | None, notes: list[str]
) -> tuple[tuple[ArtifactNode, ...], Tracker | None]:
    """Return all model versions, and the registry, where it answers; else that is a note."""
    if tracker is None:
        return (), None
    try:
        return tuple(all_versions(tracker)), tracker
    except TrackingError as error:
        notes.append(f"model versions and what runs recorded are not looked at: {error}")
        return (), None
