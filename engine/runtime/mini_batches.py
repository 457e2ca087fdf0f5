"""Mini-batches: which rows make one optimizer step, on one rank or on many."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import DataError
from engine.parallel.layout import DATA_AXES
from engine.parallel.process_groups import Ranks


def minibatch_indices(
    rows: int, size: int, ranks: Ranks, generator: torch.Generator | None
) -> list[Tensor]:
    """Split this rank's `rows` into mini-batches of `size` rows over all ranks; 0: one of all rows.

    Returns row numbers (long), shuffled by `generator` where there are several mini-batches. All
    ranks get equally many of them, so that they step together: with several data-parallel ranks
    each splits its own rows into equal parts. Raises DataError if a rank has fewer rows than that.
    """
    group = ranks.group(*DATA_AXES)
    total = rows if group is None else _total(rows, ranks)
    count = math.ceil(total / size) if size else 1
    if count <= 1:
        return [torch.arange(rows)]
    order = torch.randperm(rows, generator=generator)
    if group is None:
        return list(order.split(size))
    if rows < count:
        raise DataError(
            f"a rank has {rows} rows for {count} mini-batches; raise ppo_mini_batch_size, or use "
            "fewer data-parallel ranks"
        )
    return list(order.tensor_split(count))


def _total(rows: int, ranks: Ranks) -> int:
    """Rows of all data-parallel ranks."""
    assert ranks.mesh is not None
    return int(ranks.sum_over(torch.tensor(rows, device=ranks.mesh.device_type), DATA_AXES))
