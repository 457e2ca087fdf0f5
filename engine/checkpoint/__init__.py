"""Checkpoints: atomic, checksummed, saved asynchronously, on a disk or in an object store.

Read `store` first: it commits, finds and removes them. `format` has their files, `state_dict` the
way of a state to them and back, `saver` saves beside training, `run_lock` keeps other runs out.
"""
# ruff: noqa: F401  # what other rooms import

from engine.checkpoint.saver import Saver
from engine.checkpoint.store import (
    Checkpoint,
    CheckpointDraft,
    CheckpointStore,
    find_latest,
    open_checkpoint,
)
