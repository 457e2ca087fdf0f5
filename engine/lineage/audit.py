"""Checking a graph: every artifact re-hashed, every link compared with what its child recorded.

A fault is something that changed or is gone. A note is something that could not be checked. A store
that doesn't answer is neither: checking ends in a StorageError, and may be tried again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, LineageError, StorageError, TrackingError
from engine.lineage.graph import (
    CHECKPOINT,
    MODEL_VERSION,
    ArtifactNode,
    artifact_node,
    place_in_store,
)
from engine.lineage.lookup import recorded_manifests
from engine.storage.artifacts import SOURCE, differences, read_manifest
from engine.storage.digests import MANIFEST, hash_file, tree_digest
from engine.storage.filesystem import as_path, is_remote
from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG

if TYPE_CHECKING:
    from engine.lineage.lookup import Review
    from engine.tracking import Tracker


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that was found, or could not be checked."""

    key: str  # the node's; "" for what concerns no node
    text: str  # a sentence
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class Audit:
    """What checking found."""

    checked: int  # nodes that were re-hashed, or were to be and are missing
    findings: tuple[AuditFinding, ...]

    @property
    def faults(self) -> tuple[AuditFinding, ...]:
        """What changed or is missing."""
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def notes(self) -> tuple[AuditFinding, ...]:
        """What could not be checked."""
        return tuple(finding for finding in self.findings if not finding.is_fault)


def audit(review: Review, on_node: Callable[[ArtifactNode], None] | None = None) -> Audit:
    """Check every node and edge of a review's graph; nothing is changed anywhere.

    Raises StorageError when a store doesn't answer.
    """
    graph = review.graph
    findings: list[AuditFinding] = []
    answers, checked = True, 0
    for node in graph.nodes.values():
        if on_node is not None:
            on_node(node)
        own = _check_node(node, review.tracker)
        checked += all(finding.is_fault for finding in own)
        findings += own
        records = _records(node, review)
        if links := _check_links(node, records):
            again = _was_rebuilt(node, review)
            findings += [AuditFinding(node.key, again, is_fault=False)] if again else links
        if node.manifest is not None and not records and answers:
            found, answers = _check_leaf(node, review)
            findings += found
    if not graph.focus:  # of a store as a whole, a manifest that can't be read is damage
        findings += [AuditFinding("", fault) for fault in review.index.unreadable]
    findings += [AuditFinding("", note, is_fault=False) for note in review.notes]
    return Audit(checked, tuple(dict.fromkeys(findings)))


def _check_node(node: ArtifactNode, tracker: Tracker | None) -> list[AuditFinding]:
    """Compare what lies at a node's address with what is recorded of it."""
    if node.missing:
        return [AuditFinding(node.key, node.missing)]
    if node.manifest is not None:
        return [AuditFinding(node.key, text) for text in differences(node.uri, node.manifest)]
    if node.kind == SOURCE:
        return _check_source(node)
    if node.kind == CHECKPOINT:
        return _check_checkpoint(node)
    if node.kind == MODEL_VERSION:
        return _check_version(node, tracker)
    return []


def _check_source(node: ArtifactNode) -> list[AuditFinding]:
    """Hash a source file or folder; what is elsewhere, or nowhere, is noted."""
    if not node.uri or is_remote(node.uri):
        return [
            AuditFinding(node.key, f"not checked: {node.uri or node.name} is not on a disk", False)
        ]
    path = as_path(node.uri)
    try:
        found = hash_file(path) if path.is_file() else tree_digest(path)
    except OSError as error:
        return [AuditFinding(node.key, f"can't read {path}: {error.strerror or error}")]
    except LineageError as error:
        return [AuditFinding(node.key, str(error))]
    if found == node.digest:
        return []
    text = f"source {path} is now {found[:12]} where {node.digest[:12]} was read"
    return [AuditFinding(node.key, text + (f"; see its {MANIFEST}" if _has_manifest(path) else ""))]


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _check_checkpoint(node: ArtifactNode) -> list[AuditFinding]:
    from engine.checkpoint import open_checkpoint

    try:
        open_checkpoint(node.uri)
    except StorageError:
        raise
    except EngineError as error:
        return [AuditFinding(node.key, str(error))]
    return []


def _check_version(node: ArtifactNode, tracker: Tracker | None) -> list[AuditFinding]:
    """Compare the registry's own copy, which is what gets served, with its tags and manifest."""
    if "://" in node.uri or Path(node.uri).is_absolute():
        return _check_copy(node, node.uri)
    if tracker is None:
        return [AuditFinding(node.key, f"not checked: MLflow's copy of {node.label}", False)]
    import mlflow.artifacts

    with tempfile.TemporaryDirectory(prefix="hybridflyte-lineage-") as scratch:
        try:
            with tracker.translated("download a model"):
                name, _, number = node.key.removeprefix(f"{MODEL_VERSION}:").rpartition(":")
                address = tracker.client.get_model_version_download_uri(name, number)
                copy = mlflow.artifacts.download_artifacts(
                    address, dst_path=scratch, tracking_uri=tracker.uri
                )
        except TrackingError as error:
            return [AuditFinding(node.key, str(error))]
        return _check_copy(node, copy)


def _check_copy(node: ArtifactNode, copy: str) -> list[AuditFinding]:
    what = f"{node.label}: MLflow's copy"
    try:
        manifest = read_manifest(copy)
    except LineageError as error:
        if "artifact_kind" in node.facts:
            return [AuditFinding(node.key, f"{what}: {error}")]
        return _check_bare_copy(node, copy)
    faults = [f"{what}: {text}" for text in differences(copy, manifest)]
    if manifest.digest != node.digest:
        faults.append(
            f"{what} is {manifest.digest[:12]} where the tag {ARTIFACT_TAG} says {node.digest[:12]}"
        )
    wanted = node.facts.get(MANIFEST_TAG, "")
    if wanted and manifest.own_digest != wanted:
        faults.append(
            f"{what} has a {MANIFEST} of SHA-256 {manifest.own_digest[:12]} where the tag "
            f"{MANIFEST_TAG} says {wanted[:12]}; it was edited"
        )
    return [AuditFinding(node.key, fault) for fault in faults]


def _check_bare_copy(node: ArtifactNode, copy: str) -> list[AuditFinding]:
    """Check a model that was registered without a manifest by its content alone."""
    try:
        found = tree_digest(copy)
    except LineageError as error:
        return [AuditFinding(node.key, f"{node.label}: {error}")]
    if found == node.digest:
        return []
    text = f"{node.label}: MLflow's copy is now {found[:12]} where {node.digest[:12]} was logged"
    return [AuditFinding(node.key, text)]


def _check_links(node: ArtifactNode, records: Mapping[str, str]) -> list[AuditFinding]:
    """Compare a node's manifest with what its children recorded of it."""
    if node.manifest is None:
        return []
    own = node.manifest.own_digest
    recorders: dict[str, list[str]] = {}
    for child, digest in records.items():
        if digest != own:
            recorders.setdefault(digest, []).append(child)
    return [
        AuditFinding(
            node.key,
            f"{node.uri}/{MANIFEST} is of SHA-256 {own[:12]} where {_names(children)} recorded "
            f"{digest[:12]}: its parents, configuration or metrics were edited, or the artifact "
            "was made again",
        )
        for digest, children in recorders.items()
    ]


def _names(children: list[str]) -> str:
    more = f" and {len(children) - 3} more" if len(children) > 3 else ""
    return ", ".join(children[:3]) + more


def _records(node: ArtifactNode, review: Review) -> dict[str, str]:
    """Return what is recorded of a node's manifest, its digest by the name of who recorded it.

    Artifacts of equal content and different manifests have their own children.
    """
    graph, index = review.graph, review.index
    found = {
        graph.nodes[edge.child].name: edge.manifest
        for edge in graph.children(node.key)
        if edge.manifest
    }
    others = {p.manifest.own_digest for p in index.with_digest(node.digest)}
    if node.manifest is not None:
        others.discard(node.manifest.own_digest)
    for place, parent in index.made_from(node.digest):
        is_its_child = place_in_store(parent, place.uri) == node.uri
        if (
            parent.manifest
            and parent.kind == node.kind
            and (is_its_child or parent.manifest not in others)
        ):
            found[artifact_node(place).name] = parent.manifest
    for version in review.versions:
        digest = version.facts.get(MANIFEST_TAG, "")
        if version.digest == node.digest and digest and digest not in others:
            found[version.name] = digest
    return found


def _was_rebuilt(node: ArtifactNode, review: Review) -> str:
    """What to note of an artifact that was lost and made again, after its children; else nothing.

    The run that made it recorded its manifest, and its content is what its children were made from.
    """
    assert node.manifest is not None
    try:
        recorded = recorded_manifests(review.tracker, node.digest) if review.tracker else set()
    except TrackingError:
        return ""
    if node.manifest.own_digest not in recorded:
        return ""
    return f"{node.name} was made again after what came of it: same content, a manifest of its own"


def _check_leaf(node: ArtifactNode, review: Review) -> tuple[list[AuditFinding], bool]:
    """Compare a manifest that no other record names with what its run recorded.

    The second value is False when MLflow did not answer.
    """
    recorded: set[str] = set()
    answered = True
    if review.tracker is not None:
        try:
            recorded = recorded_manifests(review.tracker, node.digest)
        except TrackingError as error:
            return [AuditFinding("", f"not compared with MLflow: {error}", False)], False
    assert node.manifest is not None
    own = node.manifest.own_digest
    if not recorded:
        text = (
            f"{node.name}: no child, run or model version records its manifest's digest, so an "
            "edit of its parents, configuration or metrics would not show"
        )
        return [AuditFinding(node.key, text, is_fault=False)], answered
    if own in recorded:
        return [], answered
    said = ", ".join(sorted(digest[:12] for digest in recorded))
    text = f"{node.uri}/{MANIFEST} is of SHA-256 {own[:12]} where its run recorded {said}"
    return [AuditFinding(node.key, f"{text}: it was edited")], answered
