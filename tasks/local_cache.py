"""Flyte's local cache: forgetting results whose artifact is gone, so that they are made again.

On a cluster nothing of this applies: there the catalogue is Flyte's own, and `local_artifact` names
a lost artifact with the way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS = "tasks."  # cache keys begin with the task's name, e.g. tasks.sft.sft-<version>-<inputs>


def forget_lost() -> int:
    """Drop cached results of our tasks that point to folders no longer there; return how many.

    flytekit would hand such a path to the next task and end with a traceback.
    """
    from flyteidl.core.literals_pb2 import LiteralMap
    from flytekit.core.local_cache import LocalTaskCache

    if not LocalTaskCache._initialized:
        LocalTaskCache.initialize()
    cache: Any = LocalTaskCache._cache
    lost = 0
    for key in [key for key in cache.iterkeys() if str(key).startswith(OURS)]:
        stored = cache.get(key)
        outputs = LiteralMap.FromString(stored) if isinstance(stored, bytes) else LiteralMap()
        if any(not path.exists() for path in local_outputs(outputs)):
            lost += bool(cache.delete(key))
    return lost


def local_outputs(outputs: Any) -> Iterator[Path]:
    """The files and folders of this machine among a task's outputs (a protobuf LiteralMap)."""
    for literal in outputs.literals.values():
        uri = literal.scalar.blob.uri
        if uri and "://" not in uri:
            yield Path(uri)
