"""Completions that no step has used yet, in checkpoints: prompts and rows, as trees and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict


@dataclass(frozen=True, slots=True)
class Queued:
    """Finished completions and the prompts that they belong to."""

    prompts: Batch
    done: Batch  # whole groups, with the versions that they were sampled under

    def tree(self) -> StateDict:
        """Tensors and plain values."""
        return {"prompts": batch_tree(self.prompts), "done": batch_tree(self.done)}

    @staticmethod
    def of(tree: StateDict) -> Queued:
        """What `tree` gave."""
        return Queued(batch_of(tree["prompts"]), batch_of(tree["done"]))


@dataclass(frozen=True, slots=True)
class Pending:
    """What rollout has done and begun that no step has used yet."""

    queued: Sequence[Queued] = ()
    begun: Sequence[Batch] = ()  # single prompts, with what is there of their completions


def nothing_pending() -> AbstractContextManager[Pending]:
    """Rollout that is not ahead of the trainer."""
    return nullcontext(Pending())


def batch_tree(batch: Batch) -> StateDict:
    """A batch as tensors and plain values."""
    return {
        "tensors": {name: batch[name] for name in batch.names},
        "columns": {name: plain(list(column)) for name, column in batch.columns.items()},
    }


def batch_of(tree: StateDict) -> Batch:
    """What `batch_tree` gave; tuples and arrays in columns have become lists."""
    return Batch({name: t.clone() for name, t in tree["tensors"].items()}, tree["columns"])


def plain(value: Any) -> Any:
    """`value` without arrays, tuples and NumPy's numbers; what JSON has no word for as text."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
