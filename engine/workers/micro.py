"""Micro-batches: rows of similar length, trimmed to what they hold, within a token budget."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.batch import Batch
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
    """Drop the columns that are padding in every row; widths P and R shrink together."""
    mask, width = batch["attention_mask"], batch["responses"].shape[1]
    prompt_width = mask.shape[1] - width
    p = int(mask[:, :prompt_width].sum(1).max())
    r = max(1, int(mask[:, prompt_width:].sum(1).max()))
    tensors: dict[str, Tensor] = {}
    for name, value in batch.as_dict().items():
        if value.dim() < 2:
            tensors[name] = value
        elif name in ("input_ids", "attention_mask", "position_ids"):
            tensors[name] = value[:, prompt_width - p : prompt_width + r]
        elif name == "prompts":
            tensors[name] = value[:, prompt_width - p :]
        else:
            tensors[name] = value[:, :r]
    return Batch(tensors)
