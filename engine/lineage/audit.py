"""Check a graph: re-hash every artifact, and compare every link with its child's record.

A fault is something that changed or is gone. A note is something that could not be checked. A store
that doesn't answer is neither: checking ends in a StorageError, and may be tried again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError, LineageError, StorageError, TrackingError
from engine.lineage.graph import (
    CHECKPOINT,
    MODEL_VERSION,
    ArtifactNode,
    artifact_node,
    location_in_store,
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
    """The findings of an audit."""

    checked: int  # nodes that were re-hashed, or were to be and are missing
    findings: tuple[AuditFinding, ...]

    @property
    def faults(self) -> tuple[AuditFinding, ...]:
        """Return the findings of what changed or is missing."""
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def notes(self) -> tuple[AuditFinding, ...]:
        """Return the findings of what could not be checked."""
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
        findings_of_node = _check_node(node, review.tracker)
        checked += all(finding.is_fault for finding in findings_of_node)
        findings += findings_of_node
        if node.manifest is not None:
            try:
                findings += _check_manifest(node, node.manifest.own_digest, review, answers)
            except TrackingError as error:
                answers = False
                findings.append(AuditFinding("", f"not compared with MLflow: {error}", False))
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
    if node.kind == MODEL_VERSION:
        return _check_version(node, tracker)
    if node.kind == CHECKPOINT:
        from engine.checkpoint import open_checkpoint

        try:
            open_checkpoint(node.uri)
        except StorageError:
            raise
        except EngineError as error:
            return [AuditFinding(node.key, str(error))]
    return []


def _check_source(node: ArtifactNode) -> list[AuditFinding]:
    """Hash a source file or folder; what is elsewhere, or nowhere, is noted."""
    if not node.uri or is_remote(node.uri):
        return [
            AuditFinding(node.key, f"not checked: {node.uri or node.name} is not on a disk", False)
        ]
    path = as_path(node.uri)
    try:
        actual = hash_file(path) if path.is_file() else tree_digest(path)
    except OSError as error:
        return [AuditFinding(node.key, f"can't read {path}: {error.strerror or error}")]
    except LineageError as error:
        return [AuditFinding(node.key, str(error))]
    if actual == node.digest:
        return []
    text = f"source {path} is now {actual[:12]} where {node.digest[:12]} was read"
    hint = f"; see its {MANIFEST}" if (path / MANIFEST).is_file() else ""
    return [AuditFinding(node.key, text + hint)]


def _check_version(node: ArtifactNode, tracker: Tracker | None) -> list[AuditFinding]:
    """Compare the registry's own copy, which is what gets served, with its tags and manifest."""
    if "://" in node.uri or Path(node.uri).is_absolute():
        return _check_copy(node, node.uri)
    if tracker is None:
        return [AuditFinding(node.key, f"not checked: MLflow's copy of {node.label}", False)]
    name, _, number = node.key.removeprefix(f"{MODEL_VERSION}:").rpartition(":")
    with tempfile.TemporaryDirectory(prefix="hybridflyte-lineage-") as scratch:
        try:
            copy = tracker.download_files(name, number, scratch)
        except TrackingError as error:
            return [AuditFinding(node.key, str(error))]
        return _check_copy(node, str(copy))


def _check_copy(node: ArtifactNode, copy: str) -> list[AuditFinding]:
    what, tagged = f"{node.label}: MLflow's copy", node.digest[:12]
    try:
        manifest = read_manifest(copy)
    except LineageError as error:
        if "artifact_kind" in node.facts:
            return [AuditFinding(node.key, f"{what}: {error}")]
        try:  # a model that was registered without a manifest
            digest = tree_digest(copy)
        except LineageError as problem:
            return [AuditFinding(node.key, f"{node.label}: {problem}")]
        text = f"{what} is now {digest[:12]} where {tagged} was logged"
        return [] if digest == node.digest else [AuditFinding(node.key, text)]
    faults = [f"{what}: {text}" for text in differences(copy, manifest)]
    if manifest.digest != node.digest:
        faults.append(
            f"{what} is {manifest.digest[:12]} where the tag {ARTIFACT_TAG} says {tagged}"
        )
    recorded = node.facts.get(MANIFEST_TAG, "")
    if recorded and manifest.own_digest != recorded:
        faults.append(
            f"{what} has a {MANIFEST} of SHA-256 {manifest.own_digest[:12]} where the tag "
            f"{MANIFEST_TAG} says {recorded[:12]}; it was edited"
        )
    return [AuditFinding(node.key, fault) for fault in faults]


def _check_manifest(
    node: ArtifactNode, manifest_digest: str, review: Review, answers: bool
) -> list[AuditFinding]:
    """Compare a manifest's SHA-256 with what children, versions or its run recorded of it.

    An artifact that was lost and made again, after its children, is noted: the run that made it
    recorded its manifest, and its content is what its children were made from. answers: whether
    MLflow has answered so far. Raises TrackingError when it doesn't and no other record is there.
    """
    records = _records(node, review)
    differing: dict[str, list[str]] = {}
    for child, digest in records.items():
        if digest != manifest_digest:
            differing.setdefault(digest, []).append(child)
    if (records and not differing) or not (records or answers):
        return []
    recorded: set[str] = set()
    try:
        if review.tracker is not None:
            recorded = recorded_manifests(review.tracker, node.digest)
    except TrackingError:
        if not records:
            raise
    if manifest_digest in recorded:
        text = (
            f"{node.name} was made again after what came of it: same content, a manifest of its own"
        )
        return [AuditFinding(node.key, text, is_fault=False)] if records else []
    where = f"{node.uri}/{MANIFEST} is of SHA-256 {manifest_digest[:12]} where"
    faults = []
    for digest, children in differing.items():
        names = ", ".join(children[:3])
        names += f" and {len(children) - 3} more" if len(children) > 3 else ""
        text = "its parents, configuration or metrics were edited, or the artifact was made again"
        faults.append(AuditFinding(node.key, f"{where} {names} recorded {digest[:12]}: {text}"))
    if records:
        return faults
    if recorded:
        digests = ", ".join(sorted(digest[:12] for digest in recorded))
        return [AuditFinding(node.key, f"{where} its run recorded {digests}: it was edited")]
    text = (
        f"{node.name}: no child, run or model version records its manifest's digest, so an edit of "
        "its parents, configuration or metrics would not show"
    )
    return [AuditFinding(node.key, text, is_fault=False)]


def _records(node: ArtifactNode, review: Review) -> dict[str, str]:
    """Return what is recorded of a node's manifest, its digest by the name of who recorded it.

    Artifacts of equal content and different manifests have their own children.
    """
    graph, index = review.graph, review.index
    records = {
        graph.nodes[edge.child].name: edge.manifest
        for edge in graph.children(node.key)
        if edge.manifest
    }
    others = {p.manifest.own_digest for p in index.with_digest(node.digest)}
    others -= {node.manifest.own_digest} if node.manifest else set()
    for artifact, parent in index.made_from(node.digest):
        is_its_child = location_in_store(parent, artifact.uri) == node.uri
        is_recorded = parent.manifest and parent.kind == node.kind
        if is_recorded and (is_its_child or parent.manifest not in others):
            records[artifact_node(artifact).name] = parent.manifest
    for version in review.versions:
        digest = version.facts.get(MANIFEST_TAG, "")
        if version.digest == node.digest and digest and digest not in others:
            records[version.name] = digest
    return records
