"""Which checkpoints are kept, and how the others are removed."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.checkpoint.format import MARKER, Marker
from engine.errors import CheckpointError, ConfigError
from engine.storage.atomic import process_is_alive
from engine.storage.folder import Folder

log = logging.getLogger(__name__)

_DRAFT = re.compile(r"\.writing-step_\d+-(?P<host>[^-]+)-(?P<pid>\d+)-[0-9a-f]+")
_ABANDONED_AFTER_S = 24 * 3600.0  # a draft of another machine counts as abandoned after this


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How many checkpoints are kept."""

    last: int = 2  # newest, at least 1
    best: int = 1  # by `metric`; without effect where it is empty
    metric: str = ""  # e.g. "validation/reward"
    mode: Literal["max", "min"] = "max"  # whether a high or a low value is good

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0 or self.mode not in ("max", "min"):
            raise ConfigError(
                f"keep_last={self.last} must be at least 1, keep_best={self.best} at least 0 and "
                f"mode={self.mode!r} max or min"
            )


def retained(markers: Sequence[Marker], keep: RetentionPolicy) -> set[int]:
    """Sequence numbers of the checkpoints that stay: the newest of each step, last n and best k.

    Where two are equally good the newer one stays.
    """
    newest_first = sorted(markers, key=lambda m: -m.sequence)
    of_step: dict[int, Marker] = {}
    for marker in newest_first:
        of_step.setdefault(marker.step, marker)
    candidates = list(of_step.values())
    stay = candidates[: keep.last]
    sign = 1.0 if keep.mode == "max" else -1.0
    measured = [m for m in candidates if math.isfinite(m.metrics.get(keep.metric, math.nan))]
    best = sorted(measured, key=lambda m: -sign * m.metrics[keep.metric])[: keep.best]
    return {m.sequence for m in (*stay, *best)}


def remove_checkpoint(folder: Folder) -> None:
    """Delete a checkpoint, marker first: what a kill leaves of it is torn, and never chosen.

    A refusal is a warning, since the new checkpoint is safe all the same.
    """
    try:
        folder.remove_file(MARKER)
        folder.remove()
    except CheckpointError as error:
        log.warning("an old checkpoint stays: %s", error)


def draft_name(step: int) -> str:
    """A folder name for an uncommitted checkpoint, with its host and process."""
    return f".writing-step_{step}-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def abandoned_drafts(root: Folder, names: Iterable[str], own: Iterable[str]) -> list[str]:
    """Drafts whose process has died here, or that another machine left a day ago.

    What is named otherwise is nobody's draft, and stays.
    """
    return [
        name
        for name in names
        if name not in own and (draft := _DRAFT.fullmatch(name)) and _is_abandoned(root, draft)
    ]


def _is_abandoned(root: Folder, draft: re.Match[str]) -> bool:
    pid = int(draft["pid"])
    # A restarted container may give its process the number of the one that died.
    if draft["host"] == _host() and (pid == os.getpid() or not process_is_alive(pid)):
        return True
    try:
        age = time.time() - os.stat(f"{root.path}/{draft[0]}").st_mtime
    except OSError:  # it is gone, or not ours to look at
        return False
    return age > _ABANDONED_AFTER_S


def _host() -> str:
    return socket.gethostname().replace("-", "_")
