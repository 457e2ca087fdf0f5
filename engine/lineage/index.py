"""All manifests of one or more stores: found, read, and looked up by digest and by parent.

What lives here: scanning folders and buckets for manifests. What does not: walking from one
artifact to another (`.graph`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.errors import LineageError
from engine.storage.filesystem import Files, as_path, is_remote, translated
from engine.storage.hashing import MANIFEST, READERS
from engine.storage.locations import ARTIFACTS, home, shared_store
from engine.storage.manifest import Manifest, Parent, read_manifest


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
