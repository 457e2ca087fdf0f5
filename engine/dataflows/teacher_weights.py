"""Which teachers a row has, and how much each counts."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import AlgorithmConfig
from engine.errors import DataError


def teacher_weights(config: AlgorithmConfig, batch: Batch) -> Tensor:
    """Shares `[B, T]` of T teachers: by `weight`, or 1 of the one that `route_by` chooses.

    Raises DataError where the rows lack that column, or have a value that is no teacher's.
    """
    teachers, column = config.teachers, config.distillation.route_by
    if not column:
        shares = torch.tensor([teacher.weight for teacher in teachers])
        return (shares / shares.sum()).repeat(len(batch), 1)
    setting = f"algorithm.distillation.route_by={column!r}"
    if column not in batch.columns:
        raise DataError(
            f"{setting} is no column of the data; name one of {', '.join(sorted(batch.columns))}"
        )
    names = [teacher.rows for teacher in teachers]
    values = [str(value) for value in batch.columns[column]]
    if strange := sorted(set(values) - set(names)):
        raise DataError(
            f"{setting} is {strange[0]!r} in a row, and no teacher has rows={strange[0]!r}; there "
            f"are teachers for {', '.join(names)}"
        )
    chosen = torch.tensor([names.index(value) for value in values])
    return torch.nn.functional.one_hot(chosen, len(names)).float()
