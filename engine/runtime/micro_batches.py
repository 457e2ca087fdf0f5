"""Micro-batches: rows of similar length, or of shared prompts, trimmed, within a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import FIELDS, Batch
from engine.data.bucketing import shared_prompt_batches, token_budget_batches
from engine.models.alignment import left_align
from engine.models.packing import (
    Packing,
    is_worthwhile,
    same_prompts,
    worthwhile_tree,
)
from engine.models.prefix_tree import prefix_tree_batches, prompt_tree


def micro_batches(
    batch: Batch, max_tokens: int, packing: Packing = False
) -> Iterator[tuple[Tensor, Batch]]:
    """Cut a batch into runs of rows, each within the token budget.

    Padded rows are of similar length; with packing, where it is worthwhile, rows that share a
    prompt, or more, stay together as far as the budget allows, and what they share counts once.
    Yields row numbers `[b]` and those rows, their prompt and response columns trimmed to the
    longest of them.
    """
    for index in _cut(batch, max_tokens, packing):
        rows = torch.tensor(index)
        every = index == list(range(len(batch)))
        yield rows, trim(batch if every else batch.rows(rows))


def _cut(batch: Batch, max_tokens: int, packing: Packing) -> list[list[int]]:
    mask, width = batch["attention_mask"], batch["responses"].shape[1]
    lengths = mask.sum(1).tolist()
    padded = token_budget_batches(lengths, max_tokens)
    if not packing or not lengths:
        return padded
    prompts = mask[:, : mask.shape[1] - width].sum(1)
    ids, prompt_lengths = left_align(batch).input_ids, prompts.tolist()
    groups = same_prompts(ids, prompts)
    by_prompt = prompt_tree(groups, prompt_lengths)
    positions = sum(len(rows) * max(lengths[i] for i in rows) for rows in padded)
    tree = worthwhile_tree(ids, lengths, prompt_lengths, by_prompt)
    if tree is not None and is_worthwhile(packing, tree.size(lengths), positions):
        return prefix_tree_batches(tree, ids, lengths, prompt_lengths, max_tokens)
    if not is_worthwhile(packing, by_prompt.size(lengths), positions):
        return padded
    return shared_prompt_batches(groups, lengths, prompt_lengths, max_tokens)


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
        axis = [*FIELDS[name].shape.split(), ""][1] if name in FIELDS else ""
        start = prompt_width - p if "P" in axis else 0
        stops = {"P+R": prompt_width + r, "P": prompt_width, "R": r}
        tensors[name] = value[:, start : stops[axis]] if axis in stops else value
    return Batch(tensors)


def untrimmed(
    batch: Batch, passes: Sequence[tuple[Tensor, Batch]], parts: Sequence[Tensor]
) -> Tensor:
    """`[b, P+R, K]` of each of `batch`'s micro-batches as `[B, P+R, K]`: 0 where they were trimmed.

    `parts` may be more than `passes`; dummy passes come last.
    """
    width, response = batch["input_ids"].shape[1], batch["responses"].shape[1]
    out = parts[0].new_zeros(len(batch), width, parts[0].shape[2])
    for (rows, micro), part in zip(passes, parts, strict=False):
        start = width - response - (part.shape[1] - micro["responses"].shape[1])
        out[rows, start : start + part.shape[1]] = part
    return out
