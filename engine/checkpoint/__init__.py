"""Checkpoints: atomic, checksummed, saved asynchronously, on a disk or in an object store."""

from engine.checkpoint.saver import Saver, SaveStats
from engine.checkpoint.store import (
    Checkpoint,
    CheckpointDraft,
    CheckpointStore,
    find_latest,
    open_checkpoint,
)

__all__ = [
    "Checkpoint",
    "CheckpointDraft",
    "CheckpointStore",
    "SaveStats",
    "Saver",
    "find_latest",
    "open_checkpoint",
]
