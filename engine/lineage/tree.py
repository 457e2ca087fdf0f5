"""Walking from an artifact to its parents, and theirs, down to the source data.

A parent is looked for at its recorded address, then by digest among the artifacts of this
machine and beside its child, so that a moved or copied store still resolves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import LineageError
from engine.lineage.manifest import (
    MANIFEST,
    Manifest,
    Parent,
    hash_file,
    read_manifest,
    tree_digest,
    verify,
)
from engine.lineage.store import artifact_path


@dataclass(frozen=True, slots=True)
class Node:
    """One artifact of the tree, found or not."""

    name: str  # its part in the making of its child, e.g. "warm_start"; "" at the root
    kind: str  # e.g. "sft"
    digest: str  # as its child recorded it
    uri: str  # where it was found, or where it was recorded when it was not
    manifest: Manifest | None  # None: a source, which carries none, or missing
    missing: bool = False
    repeated: bool = False  # its parents are shown where it first occurs
    parents: list[Node] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents after children."""
        yield self
        for parent in self.parents:
            yield from parent.walk()


def ancestry(folder: str | Path) -> Node:
    """Return the tree of an artifact folder; LineageError when it has no readable manifest."""
    manifest = read_manifest(folder)
    return _node("", manifest, str(folder), seen=set())


def _node(name: str, manifest: Manifest, uri: str, seen: set[str]) -> Node:
    """Expand one found artifact; `seen` holds digests already expanded, which also ends cycles."""
    repeated = bool(manifest.parents) and manifest.digest in seen
    seen.add(manifest.digest)
    parents = [] if repeated else [_expand(parent, uri, seen) for parent in manifest.parents]
    return Node(
        name, manifest.kind, manifest.digest, uri, manifest, repeated=repeated, parents=parents
    )


def _expand(parent: Parent, child: str, seen: set[str]) -> Node:
    """Find one parent, or say that it is missing."""
    for place in _places(parent, child):
        try:
            manifest = read_manifest(place)
        except LineageError:
            continue
        if manifest.digest == parent.digest:
            return _node(parent.name, manifest, place, seen)
    is_source = parent.kind == "source"
    missing = bool(parent.uri) and not _exists(parent.uri) if is_source else True
    return Node(parent.name, parent.kind, parent.digest, parent.uri, None, missing=missing)


def _places(parent: Parent, child: str) -> list[str]:
    """Return where an artifact may lie: its address, this machine's store, its child's store."""
    places = [parent.uri] if parent.uri else []
    places.append(str(artifact_path(parent.kind, parent.digest)))
    if child.count("/") >= 2:
        places.append(f"{child.rstrip('/').rsplit('/', 2)[0]}/{parent.kind}/{parent.digest[:16]}")
    return places


def _exists(uri: str) -> bool:
    """Tell whether a source is there; one at a remote address is taken to be."""
    return "://" in uri or Path(uri).exists()


def check(root: Node) -> list[str]:
    """Re-hash every artifact and local source of a tree; return one sentence a fault found."""
    faults = []
    for node in root.walk():
        if node.repeated:
            continue
        try:
            if node.missing:
                raise LineageError(f"{node.kind} {node.digest[:12]} is missing ({node.uri})")
            if node.manifest is not None:
                _verify_at(node)
            elif node.uri and "://" not in node.uri:
                _verify_source(node)
        except LineageError as error:
            faults.append(str(error))
    return faults


def _verify_at(node: Node) -> None:
    from engine.artifacts import local_path

    verify(local_path(node.uri))


def _verify_source(node: Node) -> None:
    """Hash a source file or folder; a folder that has a manifest of another digest has changed."""
    path = Path(node.uri)
    found = hash_file(path) if path.is_file() else tree_digest(path)
    if found != node.digest:
        raise LineageError(
            f"source {path} is now {found[:12]} where {node.digest[:12]} was read"
            + (f"; see its {MANIFEST}" if (path / MANIFEST).is_file() else "")
        )
