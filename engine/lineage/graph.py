"""The graph around an artifact, and the index of manifests that it is made from."""

from __future__ import annotations

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
from engine.storage.artifacts import SOURCE, Draft, Manifest, Parent, read_manifest
from engine.storage.digests import MANIFEST, READERS
from engine.storage.filesystem import (
    ARTIFACTS,
    Files,
    artifact_path,
    as_path,
    home,
    is_remote,
    shared_store,
    translated,
)

# All manifests of one or more stores: found, read, and looked up by digest and by parent.


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """One artifact where it lies."""

    uri: str  # folder or address, e.g. "/runs/artifacts/rl/0123456789abcdef"
    manifest: Manifest


@dataclass(frozen=True)
class Index:
    """What `scan` found."""

    roots: tuple[str, ...] = ()
    artifacts: tuple[StoredArtifact, ...] = ()
    unreadable: tuple[str, ...] = ()  # a sentence for each manifest that can't be read

    @cached_property
    def _by_digest(self) -> dict[str, list[StoredArtifact]]:
        found = defaultdict(list)
        for artifact in self.artifacts:
            found[artifact.manifest.digest].append(artifact)
        return dict(found)

    @cached_property
    def _by_parent(self) -> dict[str, list[tuple[StoredArtifact, Parent]]]:
        found = defaultdict(list)
        for artifact in self.artifacts:
            for parent in artifact.manifest.parents:
                found[parent.digest].append((artifact, parent))
        return dict(found)

    def with_digest(self, digest: str) -> list[StoredArtifact]:
        """The artifacts that hold this content."""
        return self._by_digest.get(digest, [])

    def with_prefix(self, prefix: str) -> list[StoredArtifact]:
        """The artifacts whose content digest begins so, one for each digest and kind."""
        found = {
            (p.manifest.digest, p.manifest.kind): p
            for p in self.artifacts
            if p.manifest.digest.startswith(prefix)
        }
        return list(found.values())

    def made_from(self, digest: str) -> list[tuple[StoredArtifact, Parent]]:
        """The artifacts that name this content as a parent, and how they name it."""
        return self._by_parent.get(digest, [])

    def with_inputs(self, inputs: str, sources: str) -> list[StoredArtifact]:
        """The artifacts made of equal inputs (their digest) by equal sources."""
        return [
            p
            for p in self.artifacts
            if p.manifest.sources_digest == sources and p.manifest.inputs_digest == inputs
        ]


def default_roots(artifact: str = "") -> list[str]:
    """Return the stores to search: that which an artifact lies in, this machine's, the shared one.

    An artifact is taken to lie in a store where its folder's folder bears its kind's name.
    """
    roots = []
    if artifact:
        store, _, rest = artifact.rstrip("/").rpartition(f"/{ARTIFACTS}/")
        known = is_remote(artifact) or as_path(f"{store}/{ARTIFACTS}").is_dir()
        if store and rest.count("/") == 1 and known:
            roots.append(f"{store}/{ARTIFACTS}")
    own = home() / ARTIFACTS
    if own.is_dir():
        roots.append(str(own))
    if shared_store():
        roots.append(f"{shared_store()}/{ARTIFACTS}")
    return list(dict.fromkeys(roots))


def scan(roots: Iterable[str]) -> Index:
    """Read every manifest below the roots, folders or s3:// prefixes alike.

    A root that does not exist or can't be listed is a LineageError; a manifest that can't be read
    is noted in the index. A store that doesn't answer is a StorageError.
    """
    asked = tuple(dict.fromkeys(str(root).rstrip("/") for root in roots))
    folders = [folder for root in asked for folder in _folders(root)]
    artifacts, faults = [], []
    with ThreadPoolExecutor(READERS) as pool:
        for result in pool.map(_read, dict.fromkeys(folders)):
            if isinstance(result, StoredArtifact):
                artifacts.append(result)
            else:
                faults.append(result)
    return Index(asked, tuple(artifacts), tuple(faults))


def _read(folder: str) -> StoredArtifact | str:
    try:
        return StoredArtifact(folder, read_manifest(folder))
    except LineageError as error:
        return str(error)


def _folders(root: str) -> Iterator[str]:
    """Yield the folders below `root` that have a manifest; what lies inside one is its content."""
    if is_remote(root):
        yield from _remote_folders(root)
        return
    base = as_path(root)
    if not base.is_dir():
        raise LineageError(f"store {root} does not exist; name a folder that holds artifacts")
    if (base / ARTIFACTS).is_dir() and not (base / MANIFEST).is_file():
        base = base / ARTIFACTS
    for folder, below, files in os.walk(base):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if MANIFEST in files:
            below.clear()
            yield str(Path(folder).absolute())


def _remote_folders(root: str) -> Iterator[str]:
    with translated(root, LineageError):
        names = Files(root).sizes()
    inside = ""
    for name in sorted(n for n in names if n == MANIFEST or n.endswith(f"/{MANIFEST}")):
        if inside and name.startswith(inside):
            continue
        folder = name.rpartition("/")[0]
        inside = f"{folder}/" if folder else ""
        yield f"{root}/{folder}".rstrip("/")
        if not folder:
            return


# The graph around an artifact: all it was made from, and all that was made from it.
#
# A parent is looked for in the store of its child, then at its recorded address, by digest in the
# index and among the artifacts of this machine, so that a moved store resolves, and a copied one
# is held to what is in it. Walks end on cycles, which only forged manifests have, because a node
# is expanded once.

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
        """Its label, or kind and digest."""
        return self.label or f"{self.kind} {self.digest[:12]}"

    @property
    def config(self) -> dict[str, object]:
        """The configuration that it was made by."""
        source = self.manifest or self.origin
        return source.config if source else {}

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured of it."""
        source = self.manifest or self.origin
        return source.metrics if source else {}

    @property
    def created_at(self) -> datetime | None:
        """When its manifest was written."""
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
        """The edges that lead to a node."""
        return [edge for edge in self.edges.values() if edge.child == key]

    def children(self, key: str) -> list[Edge]:
        """The edges that leave a node."""
        return [edge for edge in self.edges.values() if edge.parent == key]

    def ancestors(self, key: str) -> list[ArtifactNode]:
        """All that a node was made from, nearest first."""
        above: dict[str, list[str]] = {}
        for edge in self.edges.values():
            above.setdefault(edge.child, []).append(edge.parent)
        found = reachable(key, lambda one: above.get(one, []))
        return [self.nodes[one] for one in found if one != key]

    def add(self, node: ArtifactNode) -> bool:
        """Add a node; False when it is there already."""
        if node.key in self.nodes:
            return False
        self.nodes[node.key] = node
        return True

    def link(self, edge: Edge) -> None:
        """Add an edge; the same one twice counts once."""
        self.edges.setdefault((edge.parent, edge.child, edge.name), edge)


def reachable(start: str, neighbours: Callable[[str], Iterable[str]]) -> list[str]:
    """Return `start` and all that can be reached from it, nearest first; cycles end."""
    found = {start: None}
    queue = deque([start])
    while queue:
        for key in neighbours(queue.popleft()):
            if key not in found:
                found[key] = None
                queue.append(key)
    return list(found)


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
        """Add a node with its ancestors and descendants; it joins the graph's focus.

        `parents`: of a node without a manifest.
        """
        self.graph.add(start)
        if start.key not in self.graph.focus:
            self.graph.focus = (*self.graph.focus, start.key)
        self._ancestors(start, tuple(parents))
        if descendants:
            self._descendants(start)
            if start.kind == MODEL_VERSION:  # its artifact's descendants are its own
                for edge in self.graph.parents(start.key):
                    self._descendants(self.graph.nodes[edge.parent])
        return start

    def _ancestors(self, start: ArtifactNode, parents: tuple[Parent, ...]) -> None:
        todo = [(start, parents or _parents(start))]
        done = set()
        while todo:
            child, parents = todo.pop()
            if child.key in done:
                continue
            done.add(child.key)
            for parent in parents:
                node = self.find(parent, child.uri)
                self.graph.add(node)
                self.graph.link(Edge(node.key, child.key, parent.name, parent.manifest))
                todo.append((node, _parents(node)))

    def _descendants(self, start: ArtifactNode) -> None:
        found = reachable(start.key, self._child_keys)
        # Once all are known: the edges among them and to what was there before.
        for key in found:
            node = self.graph.nodes[key]
            if key == start.key:
                continue
            for parent in _parents(node):
                above = self.find(parent, node.uri)
                if above.key in self.graph.nodes:
                    self.graph.link(Edge(above.key, key, parent.name, parent.manifest))

    def _child_keys(self, key: str) -> list[str]:
        """Add what was made from a node; return the keys."""
        children = self._children(self.graph.nodes[key])
        for child in children:
            self.graph.add(child)
        return [child.key for child in children]

    def _children(self, node: ArtifactNode) -> list[ArtifactNode]:
        children = []
        for place, parent in self.index.made_from(node.digest):
            if self.find(parent, place.uri).key == node.key or node.kind == parent.kind == SOURCE:
                children.append(artifact_node(place))
        if node.manifest is not None:
            for version in self._versions.get(node.digest, []):
                wanted = version.facts.get("manifest_digest", "")
                if wanted in ("", node.manifest.own_digest) or not self._other(node, wanted):
                    children.append(version)
                    self.graph.link(Edge(node.key, version.key, "artifact", wanted))
        if node.kind == CHECKPOINT and node.origin is not None:
            sources = node.facts.get("sources_digest", "")
            for place in self.index.with_inputs(node.origin.inputs_digest, sources):
                child = artifact_node(place)
                children.append(child)
                self.graph.link(Edge(node.key, child.key, CHECKPOINT))
        return children

    def _other(self, node: ArtifactNode, own_digest: str) -> bool:
        """Tell whether another artifact of equal content has this manifest."""
        same = self.index.with_digest(node.digest)
        return any(place.manifest.own_digest == own_digest for place in same)

    def find(self, parent: Parent, child: str) -> ArtifactNode:
        """Find one parent of the artifact at `child`; a node that is missing if it is nowhere.

        What lies at its place in its child's store, or its content at its recorded address, is the
        parent, whatever its manifest says now: a good copy elsewhere must not hide an edit of it.
        """
        if parent.kind == SOURCE:
            return source_node(parent)
        own = place_in_store(parent, child)
        existing = self._manifest(own) if own else None
        if existing is not None and existing.digest != parent.digest:
            return _missing(parent, own, existing)
        fallback = None
        for uri in self._places(parent, child):
            manifest = self._manifest(uri)
            if manifest is None or manifest.digest != parent.digest:
                continue
            if uri in (own, parent.uri) or parent.manifest in ("", manifest.own_digest):
                return artifact_node(StoredArtifact(uri, manifest))
            fallback = fallback or StoredArtifact(uri, manifest)
        if fallback is not None:
            return artifact_node(fallback)
        return _missing(parent, parent.uri, self._manifest(parent.uri) if parent.uri else None)

    def _places(self, parent: Parent, child: str) -> list[str]:
        """Where it may lie: its child's store, its address, the index, this machine's store."""
        places = [place_in_store(parent, child), parent.uri]
        places += [p.uri for p in self.index.with_digest(parent.digest)]
        places.append(str(artifact_path(parent.kind, parent.digest)))
        if store := _store_of(child):
            places.append(f"{store}/{parent.kind}/{parent.digest[:16]}")
        places.append(child)  # a model version's own files are a copy of its artifact
        return [place for place in dict.fromkeys(places) if place]

    def _manifest(self, uri: str) -> Manifest | None:
        """Read a manifest once; None where there is none, or none that can be read."""
        if uri not in self._read:
            try:
                self._read[uri] = read_manifest(uri)
            except LineageError:
                self._read[uri] = None
        return self._read[uri]


def place_in_store(parent: Parent, child: str) -> str:
    """Where a parent lies in the store of the artifact at `child`, by the end of its address.

    Empty where its recorded address is no place of an artifact with its digest.
    """
    above, _, name = parent.uri.rstrip("/").rpartition("/")
    if above.rpartition("/")[2] != parent.kind or name.partition("-")[0] != parent.digest[:16]:
        return ""
    store = _store_of(child)
    return f"{store}/{parent.kind}/{name}" if store else ""


def _store_of(artifact: str) -> str:
    """The folder of the folder of an artifact; empty where it has none."""
    return artifact.rstrip("/").rsplit("/", 2)[0] if artifact.count("/") >= 2 else ""


def _missing(parent: Parent, where: str, existing: Manifest | None) -> ArtifactNode:
    why = f"{parent.kind} {parent.digest[:12]} is missing: it is not at "
    why += where or "any store that was searched"
    if existing is not None:
        why += f", where {existing.kind} {existing.digest[:12]} is now"
    key = f"{parent.kind}:{parent.digest}:missing"
    return ArtifactNode(key, parent.kind, parent.digest, where, missing=why)


def artifact_node(place: StoredArtifact) -> ArtifactNode:
    """The node of an artifact; copies with equal manifests are one node."""
    manifest = place.manifest
    key = f"{manifest.kind}:{manifest.digest}:{manifest.own_digest}"
    return ArtifactNode(key, manifest.kind, manifest.digest, place.uri, manifest=manifest)


def source_node(source: Parent) -> ArtifactNode:
    """The node of data made elsewhere; one at a remote address is taken to be there."""
    where = hashlib.sha256(source.uri.encode()).hexdigest()[:8]
    local = bool(source.uri) and not is_remote(source.uri)
    missing = ""
    if local and not as_path(source.uri).exists():
        missing = f"source {source.digest[:12]} is missing: it is not at {source.uri}"
    key = f"{SOURCE}:{source.digest}:{where}"
    return ArtifactNode(
        key, SOURCE, source.digest, source.uri, label=_source_label(source), missing=missing
    )


def _source_label(source: Parent) -> str:
    if "://" in source.uri:
        return source.uri
    return source.uri.rstrip("/").rsplit("/", 1)[-1] or source.name


def _parents(node: ArtifactNode) -> tuple[Parent, ...]:
    source = node.manifest or node.origin
    return source.parents if source else ()
