"""Evicts entries of Flyte's local cache whose artifact no longer exists.

Only for local runs: on a cluster the catalogue is Flyte's, and `local_artifact` reports a missing
artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASK_PREFIX = "tasks."  # of cache keys, e.g. tasks.sft.sft-<version>-<inputs>


def evict_missing() -> int:
    """Drop cached results of our tasks that point to folders no longer there; return how many.

    flytekit would hand such a path to the next task and end with a traceback.
    """
    from flyteidl.core.literals_pb2 import LiteralMap
    from flytekit.core.local_cache import LocalTaskCache

    if not LocalTaskCache._initialized:
        LocalTaskCache.initialize()
    cache: Any = LocalTaskCache._cache
    evicted = 0
    for key in [key for key in cache.iterkeys() if str(key).startswith(TASK_PREFIX)]:
        stored = cache.get(key)
        outputs = LiteralMap.FromString(stored) if isinstance(stored, bytes) else LiteralMap()
        if any(not path.exists() for path in local_outputs(outputs)):
            evicted += bool(cache.delete(key))
    return evicted


def local_outputs(outputs: Any) -> Iterator[Path]:
    """The files and folders of this machine among a task's outputs (a protobuf LiteralMap)."""
    for literal in outputs.literals.values():
        uri = literal.scalar.blob.uri
        if uri and "://" not in uri:
            yield Path(uri)
