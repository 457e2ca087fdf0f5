"""Manifests, content digests, and the graph of what was made from what.

`hashing` hashes files where they lie, `manifest` says what a folder holds and came from, `origin`
the same of checkpoints, `code` which code ran, `store` where artifacts are kept. `index` finds the
manifests of a store, `graph` walks them, `registry` adds MLflow's model versions, and `review` is
the way in: from what a person names to its graph. `audit` checks a graph, `compare` two nodes of
one. `terminal`, `page` (with `layout`, `drawing`, `differences`, `markup`, `style`) show them, and
`__main__` is the command.
"""

from engine.lineage.code import code_version, sources_digest
from engine.lineage.manifest import (
    Draft,
    Manifest,
    Parent,
    read_manifest,
    verify,
    write_manifest,
)
from engine.storage.hashing import FileEntry, hash_file, tree_digest

__all__ = [
    "Draft",
    "FileEntry",
    "Manifest",
    "Parent",
    "code_version",
    "hash_file",
    "read_manifest",
    "sources_digest",
    "tree_digest",
    "verify",
    "write_manifest",
]
