"""Micro-batches: rows of similar length, trimmed to what they hold, within a token budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.batch import FIELDS, Batch
from engine.data.bucketing import token_budget_batches


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[tuple[Tensor, Batch]]:
    """Cut a batch into runs of rows of similar length, each within the token budget.

    Yields row numbers `[b]` and those rows, their prompt and response columns trimmed to the
    longest of them.
    """
    mask = batch["attention_mask"]
    for index in token_budget_batches(mask.sum(1).tolist(), max_tokens):
        rows = torch.tensor(index)
        yield rows, trim(batch.rows(rows))


def trim(batch: Batch) -> Batch:
    """Drop the columns that are padding in every row; widths P and R shrink together.

    Fields that the batch's table doesn't know stay as they are.
    """
    mask, width = batch["attention_mask"], batch["responses"].shape[1]
    prompt_width = mask.shape[1] - width
    p = int(mask[:, :prompt_width].sum(1).max())
    r = max(1, int(mask[:, prompt_width:].sum(1).max()))
    tensors: dict[str, Tensor] = {}
    for name, value in batch.as_dict().items():
        axis = FIELDS[name].shape.partition(" ")[2] if name in FIELDS else ""
        start = prompt_width - p if "P" in axis else 0
        stops = {"P+R": prompt_width + r, "P": prompt_width, "R": r}
        tensors[name] = value[:, start : stops[axis]] if axis in stops else value
    return Batch(tensors)
