"""Completions that no step has used yet, as checkpoints store them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.batch import Batch
from engine.checkpoint.state_dict import StateDict


@dataclass(frozen=True, slots=True)
class Rollout:
    """Prompts and their finished completions."""

    prompts: Batch
    completions: Batch  # whole groups, with the versions of the weights that sampled them

    def to_tree(self) -> StateDict:
        """Tensors and plain values."""
        return {"prompts": batch_to_tree(self.prompts), "done": batch_to_tree(self.completions)}

    @staticmethod
    def from_tree(tree: StateDict) -> Rollout:
        """Restore `to_tree`; tuples and arrays in columns become lists."""
        return Rollout(batch_from_tree(tree["prompts"]), batch_from_tree(tree["done"]))


def to_json_values(value: object) -> Any:
    """`value` with arrays and tuples as lists, NumPy numbers as numbers, other types as text."""

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)

    return json.loads(json.dumps(value, default=plain))


def batch_to_tree(batch: Batch) -> StateDict:
    """Tensors and plain values of a batch."""
    return {
        "tensors": {name: batch[name] for name in batch.names},
        "columns": {name: to_json_values(list(column)) for name, column in batch.columns.items()},
    }


def batch_from_tree(tree: StateDict) -> Batch:
    """Restore `batch_to_tree`; tuples and arrays in columns become lists."""
    return Batch({name: t.clone() for name, t in tree["tensors"].items()}, tree["columns"])
