"""A batch's rows without their left padding, for a forward pass, padded on the right or packed.

Rows are moved to the left so that each starts at column 0 and padding comes last: causal attention
alone then keeps padding out, without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.errors import DataError
from engine.models.packing import (
    PackedRows,
    Packing,
    is_worthwhile,
    pack_rows,
    packing_of,
    same_prompts,
    worthwhile_tree,
)
from engine.models.prefix_tree import prompt_tree


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows without their left padding, and where each response token's prediction is read.

    `packed`: `input_ids` are [1, T], of rows laid out as one, and `positions` are columns of it.
    """

    input_ids: Tensor  # [B, L] long; row = prompt, response, padding
    rows: Tensor  # [N] long; row of each response token
    positions: Tensor  # [N] long; column whose output predicts that token
    targets: Tensor  # [N] long; the token itself
    columns: Tensor  # [N] long; its column in the batch's [B, R] fields
    lengths: Tensor | None = None  # [B] long; tokens of each row; None: a share of longer rows
    prompts: Tensor | None = None  # [B] long; how many of them are the prompt's
    packed: bool = False

    def states(self, hidden: Tensor) -> Tensor:
        """Those of the outputs `[B, L, …]` that predict response tokens: `[N, …]`."""
        own = self.to(hidden.device)
        if self.packed:
            return hidden[0].index_select(0, own.positions)
        return hidden[own.rows, own.positions]

    def to(self, device: torch.device) -> Self:
        """The same on `device`."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            values[name] = value.to(device) if isinstance(value, Tensor) else value
        return type(self)(**values)


def left_align(batch: Batch) -> Sequences:
    """Drop the left padding of `input_ids` and list the response tokens (N in all).

    A response token is one whose attention_mask is 1, masked out of the loss or not. Raises
    DataError for a row without a prompt: nothing would predict its first token.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    width = batch["responses"].shape[1]
    prompt_lengths = mask[:, : ids.shape[1] - width].sum(1)  # [B]
    if bool((prompt_lengths == 0).any()):
        row = int((prompt_lengths == 0).nonzero()[0, 0])
        raise DataError(f"row {row} of the batch has an empty prompt; give it at least one token")
    lengths = mask.sum(1)
    aligned = ids.gather(1, _sources(batch))
    present = mask[:, ids.shape[1] - width :]
    rows, columns = present.nonzero(as_tuple=True)
    positions = prompt_lengths[rows] + columns - 1
    targets = batch["responses"][rows, columns]
    return Sequences(aligned, rows, positions, targets, columns, lengths, prompt_lengths)


def left_align_tokens(batch: Batch, values: Tensor) -> Tensor:
    """`values` [B, P+R, F] of the tokens of `input_ids` as [B, L, F], rows as `left_align` does."""
    return values.take_along_dim(_sources(batch)[..., None], 1)


def restore_columns(batch: Batch, values: Tensor) -> Tensor:
    """The inverse: [B, L, F] as [B, P+R, F], 0 on padding."""
    mask = batch["attention_mask"].bool().cpu()
    out = values.new_zeros(*mask.shape, values.shape[2])
    present = torch.arange(values.shape[1]) < mask.sum(1)[:, None]
    out[mask] = values[present]
    return out


def _sources(batch: Batch) -> Tensor:
    """The column [B, L] of `input_ids` that comes to each place of the rows moved to the left."""
    mask = batch["attention_mask"].bool()
    start, length = mask.int().argmax(1), int(mask.sum(1).max())  # first real column, [B]
    columns = start[:, None] + torch.arange(length, device=mask.device)
    return columns.clamp(max=mask.shape[1] - 1)


def pack(
    model: nn.Module, seqs: Sequences, packing: Packing | None = None, multiple: int = 1
) -> PackedRows | None:
    """The rows packed on the model's device, where the model is to be given them so; else None.

    The last token of a row predicts nothing, and is left out. `packing`: None is the model's own.
    `multiple`: as in `pack_rows`; on a CPU sizes recur.
    """
    packing = packing_of(model) if packing is None else packing
    if not packing or seqs.lengths is None or seqs.prompts is None:
        return None
    lengths = torch.maximum(seqs.lengths - 1, seqs.prompts)
    ends, own = lengths.tolist(), seqs.prompts.tolist()
    by_prompt = prompt_tree(same_prompts(seqs.input_ids, seqs.prompts), own)
    tree = worthwhile_tree(seqs.input_ids, ends, own, by_prompt) or by_prompt
    if not is_worthwhile(packing, tree.size(ends), seqs.input_ids.numel()):
        return None
    device = next(model.parameters()).device
    ids, prompts = seqs.input_ids.to(device), seqs.prompts.to(device)
    recurring = device.type == "cpu"
    return pack_rows(ids, lengths.to(device), prompts, multiple, tree=tree, recurring=recurring)
