"""Checkpoints: atomic, checksummed, saved asynchronously, on a disk or in an object store."""

from engine.checkpoint.saver import Saver, SaveStats
from engine.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    Draft,
    find_latest,
    open_checkpoint,
)

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Draft",
    "SaveStats",
    "Saver",
    "find_latest",
    "open_checkpoint",
]
