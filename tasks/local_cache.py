"""Flyte's local cache: results whose artifact no longer exists, and checks that passed before.

Only for local runs: on a cluster the catalogue is Flyte's, and `local_artifact` reports a missing
artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskcache import Cache
    from flyteidl.core.literals_pb2 import LiteralMap

TASK_PREFIX = "tasks."  # of cache keys, e.g. tasks.sft.sft-<version>-<inputs>
CHECK_PREFIX = "checks."  # of what passed a check, e.g. checks.<sha256>


def evict_missing() -> int:
    """Drop cached results of our tasks that point to folders no longer there; return how many.

    flytekit would hand such a path to the next task and end with a traceback.
    """
    from flyteidl.core.literals_pb2 import LiteralMap

    cache = open_cache()
    evicted = 0
    for key in [key for key in cache.iterkeys() if str(key).startswith(TASK_PREFIX)]:
        stored = cache.get(key)
        outputs = LiteralMap.FromString(stored) if isinstance(stored, bytes) else LiteralMap()
        if any(not path.exists() for path in local_outputs(outputs)):
            evicted += bool(cache.delete(key))
    return evicted


def has_passed(check: str) -> bool:
    """Whether `remember_passed` was called for this key since the cache was last cleared."""
    return CHECK_PREFIX + check in open_cache()


def remember_passed(check: str) -> None:
    """Keep that a check passed; its key must name everything that the outcome depends on."""
    open_cache().set(CHECK_PREFIX + check, True)


def open_cache() -> Cache:
    """The diskcache.Cache that flytekit keeps local results in; `pyflyte local-cache clear`."""
    from flytekit.core.local_cache import LocalTaskCache

    if not LocalTaskCache._initialized:
        LocalTaskCache.initialize()
    return LocalTaskCache._cache


def local_outputs(outputs: LiteralMap) -> Iterator[Path]:
    """The files and folders of this machine among a task's outputs (a protobuf LiteralMap)."""
    todo = list(outputs.literals.values())
    while todo:
        literal = todo.pop()
        todo += literal.collection.literals
        for uri in (literal.scalar.blob.uri, literal.scalar.structured_dataset.uri):
            if uri and "://" not in uri:
                yield Path(uri)
