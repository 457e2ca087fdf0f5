"""The graph around an artifact, and the index of manifests that it is made from.

A parent is looked for in the store of its child, then at its recorded address, by digest in the
index and among the artifacts of this machine, so that a moved store resolves, and a copied one is
held to what is in it. Walks end on cycles, which only forged manifests have.
"""

import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

from engine.errors import LineageError
from engine.storage import filesystem
from engine.storage.artifacts import SOURCE, Draft, Manifest, Parent, read_manifest
from engine.storage.digests import MANIFEST, READERS


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    uri: str  # folder or address, e.g. "/runs/artifacts/rl/0123456789abcdef"
    manifest: Manifest


@dataclass(frozen=True)
class Index:
    """The artifacts that `scan` read, and what it could not read."""

    roots: tuple[str, ...] = ()
    artifacts: tuple[StoredArtifact, ...] = ()
    unreadable: tuple[str, ...] = ()  # a sentence for each manifest that can't be read

    @cached_property
    def by_digest(self) -> dict[str, list[StoredArtifact]]:
        groups = defaultdict(list)
        for artifact in self.artifacts:
            groups[artifact.manifest.digest].append(artifact)
        return dict(groups)

    @cached_property
    def by_parent(self) -> dict[str, list[tuple[StoredArtifact, Parent]]]:
        """The artifacts by the digests of their parents' content, and how they name those."""
        groups = defaultdict(list)
        for artifact in self.artifacts:
            for parent in artifact.manifest.parents:
                groups[parent.digest].append((artifact, parent))
        return dict(groups)


def default_roots(artifact: str = "") -> list[str]:
    """The stores to search: that which an artifact lies in, this machine's, the shared one."""
    roots = []
    store, _, rest = artifact.rstrip("/").rpartition(f"/{filesystem.ARTIFACTS}/")
    store_root = f"{store}/{filesystem.ARTIFACTS}"
    is_store = filesystem.is_remote(artifact) or filesystem.as_path(store_root).is_dir()
    if store and rest.count("/") == 1 and is_store:
        roots.append(store_root)
    local = filesystem.home() / filesystem.ARTIFACTS
    if local.is_dir():
        roots.append(str(local))
    if shared := filesystem.shared_store():
        roots.append(f"{shared}/{filesystem.ARTIFACTS}")
    return list(dict.fromkeys(roots))


def scan(roots: Iterable[str]) -> Index:
    """Read every manifest below the roots, folders or s3:// prefixes alike.

    Raises LineageError for a root that can't be listed, StorageError when a store doesn't answer.
    """

    def read(folder: str) -> StoredArtifact | str:
        try:
            return StoredArtifact(folder, read_manifest(folder))
        except LineageError as error:
            return str(error)

    names = tuple(dict.fromkeys(str(root).rstrip("/") for root in roots))
    folders = dict.fromkeys(folder for root in names for folder in _folders(root))
    with ThreadPoolExecutor(READERS) as pool:
        results = list(pool.map(read, folders))
    artifacts = tuple(result for result in results if isinstance(result, StoredArtifact))
    return Index(names, artifacts, tuple(result for result in results if isinstance(result, str)))


def _folders(root: str) -> Iterator[str]:
    """Yield the folders below `root` that have a manifest; what lies inside one is its content."""
    if filesystem.is_remote(root):
        with filesystem.translated(root, LineageError):
            names = filesystem.Files(root).sizes()
        inside: str | None = None
        for name in sorted(n for n in names if f"/{n}".endswith(f"/{MANIFEST}")):
            if inside is None or not name.startswith(inside):
                inside = name.removesuffix(MANIFEST)
                yield f"{root}/{inside}".rstrip("/")
        return
    base = filesystem.as_path(root)
    if not base.is_dir():
        raise LineageError(f"store {root} does not exist; name a folder that holds artifacts")
    if (base / filesystem.ARTIFACTS).is_dir() and not (base / MANIFEST).is_file():
        base = base / filesystem.ARTIFACTS
    for folder, below, files in os.walk(base):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if MANIFEST in files:
            below.clear()
            yield str(Path(folder).absolute())


CHECKPOINT, MODEL_VERSION = "checkpoint", "model_version"


@dataclass(frozen=True, slots=True)
class ArtifactNode:
    """One artifact, source, checkpoint or model version, found or not."""

    key: str  # unique in its graph
    kind: str  # e.g. "sft"
    digest: str  # of its content, hex
    uri: str  # where it was found, or where it was recorded when it was not
    label: str = ""  # e.g. "hybridflyte-policy version 3"; else kind and digest name it
    manifest: Manifest | None = None
    origin: Draft | None = None  # of a checkpoint: the stage that wrote it
    missing: str = ""  # why it is not there; empty: it is
    facts: dict[str, str] = field(default_factory=dict)  # what is known without a manifest

    @property
    def name(self) -> str:
        return self.label or f"{self.kind} {self.digest[:12]}"

    @property
    def draft(self) -> Draft:
        """Return what it was made from, by which settings and how well, as far as is known."""
        return self.manifest or self.origin or Draft(kind=SOURCE)

    @property
    def created_at(self) -> datetime | None:
        return self.manifest.created_at if self.manifest else None


@dataclass(frozen=True, slots=True)
class Edge:
    """`child` was made from `parent`."""

    parent: str
    child: str
    name: str  # the role of the parent, e.g. "warm_start"
    manifest: str = ""  # the digest of the parent's manifest as the child records it


@dataclass
class Graph:
    """Nodes by key, in the order in which they were found, and the edges between them."""

    focus: tuple[str, ...] = ()  # what was asked about
    nodes: dict[str, ArtifactNode] = field(default_factory=dict)
    edges: dict[tuple[str, str, str], Edge] = field(default_factory=dict)

    def parents(self, key: str) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.child == key]

    def children(self, key: str) -> list[Edge]:
        return [edge for edge in self.edges.values() if edge.parent == key]

    def ancestors(self, key: str) -> list[ArtifactNode]:
        """Return all that a node was made from, nearest first."""
        above: dict[str, list[str]] = defaultdict(list)
        for edge in self.edges.values():
            above[edge.child].append(edge.parent)
        return [self.nodes[parent] for parent in reachable(key, above.__getitem__)[1:]]

    def add(self, node: ArtifactNode) -> None:
        self.nodes.setdefault(node.key, node)

    def link(self, edge: Edge) -> None:
        self.edges.setdefault((edge.parent, edge.child, edge.name), edge)


def reachable(start: str, neighbours: Callable[[str], Iterable[str]]) -> list[str]:
    """Return `start` and all that can be reached from it, nearest first; cycles end."""
    keys = {start: None}
    queue = deque(keys)
    while queue:
        new = [key for key in dict.fromkeys(neighbours(queue.popleft())) if key not in keys]
        keys |= dict.fromkeys(new)
        queue += new
    return list(keys)


class GraphBuilder:
    """Builds a graph from manifests, an index of stores, and model versions."""

    def __init__(self, index: Index, versions: Iterable[ArtifactNode] = ()) -> None:
        self.index = index
        self.graph = Graph()
        self._versions: dict[str, list[ArtifactNode]] = {}
        for version in versions:
            self._versions.setdefault(version.digest, []).append(version)
        self._read: dict[str, Manifest | None] = {p.uri: p.manifest for p in index.artifacts}

    def walk(
        self, start: ArtifactNode, parents: Iterable[Parent] = (), descendants: bool = True
    ) -> ArtifactNode:
        """Add a node, of the `parents` if it has no manifest, with all around it, to the focus."""
        self.graph.add(start)
        if start.key not in self.graph.focus:
            self.graph.focus = (*self.graph.focus, start.key)
        todo, done = [(start, tuple(parents) or start.draft.parents)], set()
        while todo:
            child, child_parents = todo.pop()
            if child.key in done:
                continue
            done.add(child.key)
            for parent in child_parents:
                node = self.find(parent, child.uri)
                self.graph.add(node)
                self.graph.link(Edge(node.key, child.key, parent.name, parent.manifest))
                todo.append((node, node.draft.parents))
        if descendants:
            self._descendants(start)
            if start.kind == MODEL_VERSION:  # its artifact's descendants are its own
                for edge in self.graph.parents(start.key):
                    self._descendants(self.graph.nodes[edge.parent])
        return start

    def _descendants(self, start: ArtifactNode) -> None:
        def add_children(key: str) -> list[str]:
            children = self._children(self.graph.nodes[key])
            for child in children:
                self.graph.add(child)
            return [child.key for child in children]

        # Now that all are known, link them to one another and to the nodes from before.
        for key in reachable(start.key, add_children)[1:]:
            node = self.graph.nodes[key]
            for parent in node.draft.parents:
                above = self.find(parent, node.uri)
                if above.key in self.graph.nodes:
                    self.graph.link(Edge(above.key, key, parent.name, parent.manifest))

    def _children(self, node: ArtifactNode) -> list[ArtifactNode]:
        children = []
        for artifact, parent in self.index.by_parent.get(node.digest, []):
            is_node = self.find(parent, artifact.uri).key == node.key
            if is_node or node.kind == parent.kind == SOURCE:
                children.append(artifact_node(artifact))
        if node.manifest is not None:
            manifest_digest = node.manifest.own_digest
            copies = self.index.by_digest.get(node.digest, [])
            known = {copy.manifest.own_digest for copy in copies}
            for version in self._versions.get(node.digest, []):
                recorded = version.facts.get("manifest_digest", "")
                # It may have been registered from another artifact of equal content.
                if recorded in ("", manifest_digest) or recorded not in known:
                    children.append(version)
                    self.graph.link(Edge(node.key, version.key, "artifact", recorded))
        if node.kind == CHECKPOINT and node.origin is not None:
            sources, inputs = node.facts.get("sources_digest", ""), node.origin.inputs_digest
            for artifact in self.index.artifacts:
                made = artifact.manifest
                if made.sources_digest == sources and made.inputs_digest == inputs:
                    children.append(artifact_node(artifact))
                    self.graph.link(Edge(node.key, children[-1].key, CHECKPOINT))
        return children

    def find(self, parent: Parent, child: str) -> ArtifactNode:
        """Find one parent of the artifact at `child`; a node that is missing if it is nowhere."""
        if parent.kind == SOURCE:
            return source_node(parent)
        in_store = location_in_store(parent, child)
        existing = self._manifest(in_store) if in_store else None
        if existing is not None and existing.digest != parent.digest:
            return _missing(parent, in_store, existing)
        copies = self.index.by_digest.get(parent.digest, [])
        locations = [in_store, parent.uri, *(copy.uri for copy in copies)]
        locations.append(str(filesystem.artifact_path(parent.kind, parent.digest)))
        if store := _store_of(child):
            locations.append(f"{store}/{parent.kind}/{parent.digest[:16]}")
        locations.append(child)  # a model version's own files are a copy of its artifact
        fallback = None
        for uri in filter(None, dict.fromkeys(locations)):
            manifest = self._manifest(uri)
            if manifest is None or manifest.digest != parent.digest:
                continue
            # Whatever its manifest says now: a good copy elsewhere must not hide an edit of it.
            if uri in (in_store, parent.uri) or parent.manifest in ("", manifest.own_digest):
                return artifact_node(StoredArtifact(uri, manifest))
            fallback = fallback or StoredArtifact(uri, manifest)
        if fallback is not None:
            return artifact_node(fallback)
        return _missing(parent, parent.uri, self._manifest(parent.uri) if parent.uri else None)

    def _manifest(self, uri: str) -> Manifest | None:
        """Read a manifest once; None where there is none, or none that can be read."""
        if uri not in self._read:
            try:
                self._read[uri] = read_manifest(uri)
            except LineageError:
                self._read[uri] = None
        return self._read[uri]


def location_in_store(parent: Parent, child: str) -> str:
    """Return where a parent lies in its child's store, by its address' end; empty for none."""
    above, _, name = parent.uri.rstrip("/").rpartition("/")
    if above.rpartition("/")[2] != parent.kind or name.partition("-")[0] != parent.digest[:16]:
        return ""
    store = _store_of(child)
    return f"{store}/{parent.kind}/{name}" if store else ""


def _store_of(artifact: str) -> str:
    return artifact.rstrip("/").rsplit("/", 2)[0] if artifact.count("/") >= 2 else ""


def _missing(parent: Parent, where: str, existing: Manifest | None) -> ArtifactNode:
    why = f"{parent.kind} {parent.digest[:12]} is missing: it is not at "
    why += where or "any store that was searched"
    if existing is not None:
        why += f", where {existing.kind} {existing.digest[:12]} is now"
    key = f"{parent.kind}:{parent.digest}:missing"
    return ArtifactNode(key, parent.kind, parent.digest, where, missing=why)


def artifact_node(artifact: StoredArtifact) -> ArtifactNode:
    """Return the node of an artifact; copies with equal manifests are one node."""
    manifest = artifact.manifest
    key = f"{manifest.kind}:{manifest.digest}:{manifest.own_digest}"
    return ArtifactNode(key, manifest.kind, manifest.digest, artifact.uri, manifest=manifest)


def source_node(source: Parent) -> ArtifactNode:
    """Return the node of data made elsewhere; one at a remote address is taken to be there."""
    uri, missing = source.uri, ""
    if uri and not filesystem.is_remote(uri) and not filesystem.as_path(uri).exists():
        missing = f"source {source.digest[:12]} is missing: it is not at {uri}"
    label = uri if "://" in uri else uri.rstrip("/").rsplit("/", 1)[-1] or source.name
    key = f"{SOURCE}:{source.digest}:{hashlib.sha256(uri.encode()).hexdigest()[:8]}"
    return ArtifactNode(key, SOURCE, source.digest, uri, label=label, missing=missing)
