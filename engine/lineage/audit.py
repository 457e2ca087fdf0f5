"""Check a graph: re-hash every artifact, and compare every link with its child's record.

A fault is something that changed or is gone. A note is something that could not be checked. A store
that doesn't answer is neither: checking ends in a StorageError, and may be tried again.
"""

import tempfile
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError, StorageError, TrackingError
from engine.lineage import graph as lineage_graph
from engine.lineage.graph import CHECKPOINT, MODEL_VERSION, ArtifactNode
from engine.lineage.lookup import Review, recorded_manifests
from engine.storage.artifacts import SOURCE, differences
from engine.storage.digests import MANIFEST, hash_file, tree_digest
from engine.storage.filesystem import as_path, is_remote
from engine.tracking import Tracker
from engine.tracking.model_versions import MANIFEST_TAG, ModelVersion, copy_faults


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that was found, or could not be checked."""

    key: str  # the node's; "" for what concerns no node
    text: str  # a sentence
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class Audit:
    checked: int  # nodes that were re-hashed, or were to be and are missing
    findings: tuple[AuditFinding, ...]

    @property
    def faults(self) -> tuple[AuditFinding, ...]:
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def notes(self) -> tuple[AuditFinding, ...]:
        return tuple(finding for finding in self.findings if not finding.is_fault)


class _NotCheckedError(Exception):
    """A node can't be checked; the message says why."""


def audit(review: Review, trusted: Collection[str] | None = None) -> Audit:
    """Check a graph's nodes and edges, changing nothing; StorageError when a store is away.

    trusted: the public keys (hex) by one of which each manifest must be signed; None: a manifest
    need not be signed, but a signature must hold.
    """
    findings: list[AuditFinding] = []
    answers, checked = True, 0
    for node in review.graph.nodes.values():
        try:
            findings += [AuditFinding(node.key, text) for text in _faults(node, review.tracker)]
            checked += 1
        except _NotCheckedError as error:
            findings.append(AuditFinding(node.key, f"not checked: {error}", is_fault=False))
        if node.manifest is not None:
            if fault := node.manifest.signature_fault(trusted):
                findings.append(AuditFinding(node.key, f"{node.uri}: {fault}"))
            try:
                findings += _check_manifest(node, node.manifest.own_digest, review, answers)
            except TrackingError as error:
                answers = False
                findings.append(AuditFinding("", f"not compared with MLflow: {error}", False))
    if not review.graph.focus:  # of a store as a whole, a manifest that can't be read is damage
        findings += [AuditFinding("", fault) for fault in review.index.unreadable]
    findings += [AuditFinding("", note, is_fault=False) for note in review.notes]
    return Audit(checked, tuple(dict.fromkeys(findings)))


def _faults(node: ArtifactNode, tracker: Tracker | None) -> list[str]:
    """Compare what lies at a node's address with what is recorded of it."""
    if node.missing:
        return [node.missing]
    if node.manifest is not None:
        return differences(node.uri, node.manifest)
    try:
        if node.kind == SOURCE:
            return _source_faults(node)
        if node.kind == MODEL_VERSION:
            return _version_faults(node, tracker)
        if node.kind == CHECKPOINT:
            from engine.checkpoint import open_checkpoint

            open_checkpoint(node.uri)
    except StorageError:
        raise
    except EngineError as error:
        return [str(error)]
    return []


def _source_faults(node: ArtifactNode) -> list[str]:
    """Hash a source file or folder; what is elsewhere, or nowhere, is noted."""
    if not node.uri or is_remote(node.uri):
        raise _NotCheckedError(f"{node.uri or node.name} is not on a disk")
    path = as_path(node.uri)
    try:
        actual = hash_file(path) if path.is_file() else tree_digest(path)
    except OSError as error:
        return [f"can't read {path}: {error.strerror or error}"]
    hint = f"; see its {MANIFEST}" if (path / MANIFEST).is_file() else ""
    text = f"source {path} is now {actual[:12]} where {node.digest[:12]} was read{hint}"
    return [text] if actual != node.digest else []


def _version_faults(node: ArtifactNode, tracker: Tracker | None) -> list[str]:
    """Compare the registry's own copy, which is what gets served, with its tags and manifest."""
    name, _, number = node.key.removeprefix(f"{MODEL_VERSION}:").rpartition(":")
    version = ModelVersion(name, number, "", node.uri, node.facts, ())
    if "://" in node.uri or Path(node.uri).is_absolute():
        return copy_faults(node.uri, version)
    if tracker is None:
        raise _NotCheckedError(f"MLflow's copy of {node.label}")
    with tempfile.TemporaryDirectory(prefix="hybridflyte-lineage-") as scratch:
        return copy_faults(tracker.download_files(name, number, scratch), version)


def _check_manifest(
    node: ArtifactNode, manifest_digest: str, review: Review, answers: bool
) -> list[AuditFinding]:
    """Compare a manifest with its records; TrackingError if MLflow alone has them, and is away."""
    records = _records(node, review)
    differing = defaultdict(list)
    for child, digest in records.items():
        if digest != manifest_digest:
            differing[digest].append(child)
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
        text = f"{node.name} was made again after what came of it: same content, another manifest"
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
    """Return what is recorded of a node's manifest, its digest by the name of who recorded it."""
    graph, index = review.graph, review.index
    records = {
        graph.nodes[edge.child].name: edge.manifest
        for edge in graph.children(node.key)
        if edge.manifest
    }
    # Artifacts of equal content and different manifests have their own children.
    others = {artifact.manifest.own_digest for artifact in index.by_digest.get(node.digest, [])}
    others -= {node.manifest.own_digest} if node.manifest else set()
    for artifact, parent in index.by_parent.get(node.digest, []):
        is_its_child = lineage_graph.location_in_store(parent, artifact.uri) == node.uri
        is_recorded = parent.manifest and parent.kind == node.kind
        if is_recorded and (is_its_child or parent.manifest not in others):
            records[lineage_graph.artifact_node(artifact).name] = parent.manifest
    for version in review.versions:
        digest = version.facts.get(MANIFEST_TAG, "")
        if version.digest == node.digest and digest and digest not in others:
            records[version.name] = digest
    return records
