"""Manifests, content digests, and the walk from an artifact back to its sources.

`manifest` says what a folder holds and came from, `code` which code ran, `store` where artifacts
are kept, `tree` walks parents, `__main__` prints them.
"""

from engine.lineage.code import code_version, sources_digest
from engine.lineage.manifest import (
    Draft,
    FileEntry,
    Manifest,
    Parent,
    hash_file,
    read_manifest,
    tree_digest,
    verify,
    write_manifest,
)
from engine.lineage.tree import Node, ancestry

__all__ = [
    "Draft",
    "FileEntry",
    "Manifest",
    "Node",
    "Parent",
    "ancestry",
    "code_version",
    "hash_file",
    "read_manifest",
    "sources_digest",
    "tree_digest",
    "verify",
    "write_manifest",
]
