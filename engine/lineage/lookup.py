"""Look up a reference and the graph around it: the entry point of this package.

A reference is a folder or address of an artifact, a checkpoint, a file or folder that artifacts
were made from, the first hex digits of a digest, or a model version `models:/NAME@ALIAS`.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engine.errors import CheckpointError, LineageError, TrackingError, counted
from engine.lineage import graph as lineage_graph
from engine.lineage.graph import CHECKPOINT, MODEL_VERSION, ArtifactNode, Graph, Index
from engine.storage.artifacts import SOURCE, Draft, Parent, read_manifest
from engine.storage.digests import MANIFEST, code_version, hash_file, sources_digest, tree_digest
from engine.storage.filesystem import Files, as_path, is_remote, read_file, translated
from engine.tracking import Tracker, model_versions
from engine.tracking.connection import URI_VARIABLE, default_uri
from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG, ModelVersion, all_pages

ORIGIN = "origin.json"


class Origin(Draft):
    """The inputs of a folder of checkpoints: its `origin.json`, before there is an artifact."""

    code_version: str
    sources_digest: str
    created_at: datetime


def write_origin(folder: str | Path, draft: Draft) -> Origin:
    """Write `origin.json` beside checkpoints; LineageError, StorageError for no answer."""
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


PREFIX = "models:/"
PAGE = 1000


def open_registry(uri: str = "") -> Tracker:
    """Return the store at `uri`, or of this machine's settings; TrackingError if it isn't there."""
    tracker = Tracker(uri or default_uri())
    if tracker.database is not None and not tracker.database.is_file():
        raise TrackingError(f"there is no MLflow store at {tracker.uri}; set {URI_VARIABLE}")
    return tracker


def version_node(version: ModelVersion) -> ArtifactNode:
    """Return the node of a model version; its facts are its tags."""
    aliases = {"aliases": ", ".join(version.aliases)} if version.aliases else {}
    return ArtifactNode(
        key=f"{MODEL_VERSION}:{version.name}:{version.version}",
        kind=MODEL_VERSION,
        digest=version.tags.get(ARTIFACT_TAG, ""),
        uri=version.source.removeprefix("file://"),
        label=f"{version.name} version {version.version}",
        facts={**version.tags, "run_id": version.run_id, **aliases},
    )


def all_versions(tracker: Tracker) -> list[ArtifactNode]:
    """Return the nodes of all model versions that lead back to an artifact."""
    client = tracker.client
    aliases: dict[tuple[str, str], list[str]] = {}  # a search of versions leaves them out
    with tracker.translated("list the model versions"):
        for model in all_pages(lambda t: client.search_registered_models(page_token=t)):
            for alias, version in model.aliases.items():
                aliases.setdefault((model.name, str(version)), []).append(alias)
        entries = all_pages(lambda t: client.search_model_versions(max_results=PAGE, page_token=t))
        versions = [ModelVersion.of(v, aliases.get((v.name, str(v.version)), ())) for v in entries]
    return [node for node in map(version_node, versions) if node.digest]


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


DIGITS = re.compile(r"[0-9a-f]{8,64}")


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
        return [self.graph.nodes[key] for key in self.graph.focus]

    @property
    def summary(self) -> str:
        """Return the number of nodes by kind, e.g. "3 nodes: 1 dataset, 2 rl"."""
        kinds = Counter(node.kind.replace("_", " ") for node in self.graph.nodes.values())
        parts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return f"{counted(kinds.total(), 'node')}: {parts}"


def review(
    references: Sequence[str],
    stores: Sequence[str] = (),
    *,
    registry: bool = True,
    descendants: bool = True,
) -> Review:
    """Return the graph around each of `references`; without any, of all that the stores hold.

    stores: folders or s3:// prefixes to search; default: the artifact's own and this machine's.
    registry: ask MLflow for model versions. Raises LineageError, TrackingError or CheckpointError
    for what can't be found or read, StorageError when a store doesn't answer.
    """
    starts = [_locate(reference, registry) for reference in references]
    roots: dict[str, None] = dict.fromkeys(stores)
    for node, parents in starts if not stores else ():
        # A version's own files lie in MLflow's store, not in the artifact store.
        locations = [p.uri for p in parents] if parents else [node.uri] if node else [""]
        for location in locations:
            roots |= dict.fromkeys(lineage_graph.default_roots(location))
    index = lineage_graph.scan(roots or lineage_graph.default_roots())
    notes: list[str] = []
    tracker: Tracker | None = None
    versions: tuple[ArtifactNode, ...] = ()
    with suppress(TrackingError):
        tracker = open_registry() if registry else None
    try:
        versions = tuple(all_versions(tracker)) if tracker is not None else ()
    except TrackingError as error:
        tracker = None
        notes.append(f"model versions and what runs recorded are not looked at: {error}")
    builder = lineage_graph.GraphBuilder(index, versions)
    for reference, (node, parents) in zip(references, starts, strict=True):
        builder.walk(_in_index(reference, node, index), parents, descendants)
    if not references:
        for artifact in index.artifacts:
            builder.walk(lineage_graph.artifact_node(artifact), descendants=False)
        builder.graph.focus = ()
    notes += [f"not searched: {fault}" for fault in index.unreadable] if references else []
    return Review(builder.graph, index, tracker, versions, notes)


def _locate(reference: str, registry: bool) -> tuple[ArtifactNode | None, tuple[Parent, ...]]:
    """Return the node of a reference, if no index is needed for it, and a version's artifact."""
    if is_reference(reference):
        if not registry:
            raise LineageError(f"{reference} is in MLflow's registry; ask without --no-registry")
        version = open_registry().model_version(reference)
        node, parent = version_node(version), model_versions.version_parent(version, "artifact")
        if parent is None:
            raise LineageError(f"{node.label} has no tag {ARTIFACT_TAG}; give an artifact's folder")
        return node, (parent,)
    address = reference.rstrip("/").removesuffix(f"/{MANIFEST}")
    if not is_remote(address):
        if DIGITS.fullmatch(address) and not as_path(address).exists():
            return None, ()
        address = os.path.abspath(as_path(address))
    with suppress(FileNotFoundError):
        read_file(f"{address}/{MANIFEST}", LineageError)
        artifact = lineage_graph.StoredArtifact(address, read_manifest(address))
        return lineage_graph.artifact_node(artifact), ()
    if (checkpoint := _checkpoint(address)) is not None:
        return checkpoint, ()
    path = as_path(address)
    if is_remote(address) or not path.exists():
        return None, ()
    try:
        digest = hash_file(path) if path.is_file() else tree_digest(path)
    except OSError as error:
        raise LineageError(f"can't read {path}: {error.strerror or error}") from error
    source = Parent(name=path.name, kind=SOURCE, digest=digest, uri=str(path))
    return lineage_graph.source_node(source), ()


def _checkpoint(address: str) -> ArtifactNode | None:
    """Return the node of a complete checkpoint with what its stage was making; else None."""
    from engine.checkpoint.format import MARKER, read_marker
    from engine.storage.folder import CheckpointStorageError, Folder

    try:
        read_file(f"{address}/{MARKER}", LineageError)
        marker = read_marker(Folder(address))
    except FileNotFoundError:
        return None
    except CheckpointStorageError:
        raise
    except CheckpointError as error:
        raise LineageError(str(error)) from error
    origin = read_origin(address.rpartition("/")[0])
    facts = {"step": str(marker.step), "sequence": str(marker.sequence)}
    facts |= {name: f"{value:.6g}" for name, value in marker.metrics.items()}
    label = f"checkpoint of step {marker.step}"
    if origin is not None:
        names = ("code_version", "sources_digest", "flyte_execution", "mlflow_run")
        facts |= {"stage": origin.kind} | {name: getattr(origin, name) for name in names}
        label = f"{origin.kind} {label}"
    digest = marker.checksums
    node = ArtifactNode(f"{CHECKPOINT}:{digest}", CHECKPOINT, digest, address, label)
    return replace(node, origin=origin, facts=facts)


def _in_index(reference: str, node: ArtifactNode | None, index: Index) -> ArtifactNode:
    """Find a reference in the index; LineageError for one that names nothing."""
    where = ", ".join(index.roots) or "no store; name one with --store"
    if node is not None:
        if node.kind == SOURCE and not index.by_parent.get(node.digest, []):
            raise LineageError(
                f"{reference} has no {MANIFEST}, and no artifact was made from it in {where}"
            )
        return node
    if not DIGITS.fullmatch(reference):
        raise LineageError(
            f"{reference} has no {MANIFEST}; give the folder of an artifact that a stage "
            "published, a checkpoint, a source file, or models:/NAME@ALIAS"
        )
    artifacts = {
        (artifact.manifest.kind, artifact.manifest.digest): artifact
        for artifact in index.artifacts
        if artifact.manifest.digest.startswith(reference)
    }
    if not artifacts:
        raise LineageError(f"no artifact's digest begins with {reference} in {where}")
    if len(artifacts) > 1:
        names = ", ".join(f"{kind} {digest[:16]}" for kind, digest in artifacts)
        raise LineageError(f"{reference} is ambiguous: {names}; give more digits")
    return lineage_graph.artifact_node(*artifacts.values())
