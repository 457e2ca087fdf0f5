"""Keys and values of the rows in flight, and attention of one new token a row over them.

`RowCache` keeps a row's whole sequence in its slot. `GroupCache`, for several completions a prompt,
keeps each prompt once and only the completions by row: all queries of a group meet the prompt's
keys in one product, which reads them once and not once a row. Both give the same numbers but for
rounding. What is projected, and which row sits where, is the callers' business.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_COLUMN_STEP = 32  # columns that storage grows by at least


class CacheShape(NamedTuple):
    """Sizes of a model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    share: int  # query heads a key head serves
    scaling: float  # multiplies q·k


class RowCache:
    """Storage `[layers, 2, slots, kv_heads, T, head_dim]`; row r of a step owns slot r."""

    def __init__(self, shape: CacheShape, slots: int, max_columns: int, like: Tensor) -> None:
        """Hold up to `max_columns` tokens for each of `slots` rows, as tensors `like` this one."""
        self.shape, self._max_columns = shape, max_columns
        size = (shape.layers, 2, slots, shape.kv_heads, 0, shape.head_dim)
        self._kv = like.new_empty(size)
        self._slots = torch.arange(slots, device=like.device)
        self._all_columns = torch.arange(max_columns, device=like.device)
        self._used = 0  # columns that any row has used
        self.width = 0  # columns of this step
        self.moves = 0  # how often the storage was replaced by a larger one

    def place(self, kv: Tensor, which: Tensor, slots: Tensor) -> None:
        """Copy prompts `which` `[k]` of `kv` `[layers, 2, B, kv_heads, P, d]` to `slots` `[k]`."""
        width = kv.shape[4]
        self.reserve(width)
        self._kv[:, :, slots, :, :width] = kv[:, :, which]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows in slots `source` `[k]` to slots `target` `[k]`."""
        used = self._used
        self._kv[:, :, target, :, :used] = self._kv[:, :, source, :, :used]

    def begin(self, columns: Tensor, width: int | None = None) -> None:
        """Start a step in which row r's new token goes to column `columns[r]`, int64 `[L]`.

        `width`: columns to look at, which must have been reserved; None: those in use.
        """
        if width is None:
            width = int(columns.max()) + 1
            self.reserve(width)
        self.width = width
        self._columns, self._rows = columns, self._slots[: len(columns)]
        hidden = self._all_columns[: self.width] > columns[:, None]
        self.mask = self._kv.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)  # [L, T]

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v `[L, kv_heads, d]`; return all keys and values `[L, kv_heads, T, d]`."""
        keys, values = self._kv[layer]
        keys[self._rows, :, self._columns] = k
        values[self._rows, :, self._columns] = v
        live = len(self._rows)
        return keys[:live, :, : self.width], values[:live, :, : self.width]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q `[L, heads, d]` after storing k and v `[L, kv_heads, d]` → `[L, heads·d]`.

        The query heads that share a key head are folded into the query length. On CPU two batched
        products are twice as fast as SDPA at one token a row.
        """
        s, rows = self.shape, q.shape[0]
        keys, values = self.store(layer, k, v)
        folded = q.view(rows, s.kv_heads, s.share, s.head_dim)
        if q.device.type != "cpu":
            bias = self.mask[:, None, None].expand(-1, -1, s.share, -1)
            a = F.scaled_dot_product_attention(folded, keys, values, bias, scale=s.scaling)
            return a.flatten(1)
        scores = _product(folded * s.scaling, keys.transpose(2, 3))
        probs = scores.add_(self.mask[:, None, None]).softmax(-1)
        return _product(probs, values).view(rows, -1)

    def reserve(self, columns: int) -> None:
        """Make room for `columns` tokens a row, keeping what is there."""
        self._used = max(self._used, columns)
        have = self._kv.shape[4]
        if columns > have:
            room = min(self._max_columns, max(columns + _COLUMN_STEP, have + have // 2))
            self._kv = _widened(self._kv, room)
            self.moves += 1


class GroupCache:
    """Prompts `[layers, 2, groups, kv_heads, P, d]` kept once, completions in a `RowCache`."""

    def __init__(
        self, shape: CacheShape, slots: int, n: int, max_new_tokens: int, like: Tensor
    ) -> None:
        """Serve `slots` rows in groups of at most `n`, of at most `max_new_tokens` each."""
        self.shape, self._n = shape, n
        self._completions = RowCache(shape, slots, max_new_tokens, like)
        size = (shape.layers, 2, 0, shape.kv_heads, 0, shape.head_dim)
        self._prompts = like.new_empty(size)
        self._hidden = torch.empty(0, 0, dtype=torch.bool, device=like.device)  # [groups, P]
        self._group = torch.zeros(slots, dtype=torch.long, device=like.device)
        self._member = torch.zeros(slots, dtype=torch.long, device=like.device)

    def place(
        self, kv: Tensor, lengths: Tensor, which: Tensor, slots: Tensor, seated: Tensor
    ) -> None:
        """Seat rows of prompts `which` `[k]` (ascending) in `slots` `[k]`.

        `kv` is `[layers, 2, B, kv_heads, P, d]` and `lengths` `[B]` of all B prompts. Only the
        groups of the slots in `seated` are still needed of those already here.
        """
        self._drop_groups(seated)
        taken, inverse, counts = torch.unique(which, return_inverse=True, return_counts=True)
        here, width = self._prompts.shape[2], max(kv.shape[4], self._prompts.shape[4])
        old, new = _widened(self._prompts, width), _widened(kv[:, :, taken], width)
        self._prompts = torch.cat((old, new), dim=2)
        hidden = torch.arange(width, device=lengths.device) >= lengths[taken][:, None]
        padding = (0, width - self._hidden.shape[1])
        self._hidden = torch.cat((F.pad(self._hidden, padding, value=True), hidden))
        self._group[slots] = here + inverse
        first = counts.cumsum(0) - counts
        self._member[slots] = torch.arange(len(which), device=which.device) - first[inverse]
        self._make_scratch()

    def place_tails(self, kv: Tensor, slots: Tensor) -> None:
        """Copy the first columns of completions, `[layers, 2, k, kv_heads, T, d]`, to `slots`."""
        self._completions.place(kv, torch.arange(len(slots), device=slots.device), slots)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows in slots `source` `[k]` to slots `target` `[k]`."""
        self._completions.move(source, target)
        self._group[target] = self._group[source]
        self._member[target] = self._member[source]

    def trim(self, live: int) -> None:
        """Forget the prompts that none of the first `live` slots needs, once they are many."""
        needed = torch.unique(self._group[:live])
        if len(needed) < 0.75 * self._prompts.shape[2]:
            self._drop_groups(torch.arange(live, device=needed.device))
            self._make_scratch()

    def begin(self, columns: Tensor) -> None:
        """Start a step; `columns` `[L]` count within the completions."""
        self._completions.begin(columns)
        self._at = self._group[: len(columns)], slice(None), self._member[: len(columns)]
        prompt_mask = self._completions.mask.new_zeros(self._hidden.shape)
        prompt_mask.masked_fill_(self._hidden, -torch.inf)
        self._mask = torch.cat((prompt_mask[self._at[0]], self._completions.mask), dim=1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q `[L, heads, d]` after storing k and v `[L, kv_heads, d]` → `[L, heads·d]`.

        One softmax runs over the scores on the prompt, computed group by group, and those on the
        completion, computed row by row. Members of a group that have left keep old finite numbers
        in the scratch tensors, whose products nobody reads.
        """
        s, rows = self.shape, q.shape[0]
        keys, values = self._completions.store(layer, k, v)
        prompt_keys, prompt_values = self._prompts[layer]  # each [groups, kv_heads, P, d]
        width = prompt_keys.shape[2]
        folded = q.view(rows, s.kv_heads, s.share, s.head_dim) * s.scaling
        self._queries[self._at] = folded
        on_prompt = _product(self._queries.flatten(2, 3), prompt_keys.transpose(2, 3))
        on_prompt = on_prompt.view(self._scratch_shape(width))[self._at]
        scores = torch.cat((on_prompt, _product(folded, keys.transpose(2, 3))), dim=-1)
        probs = scores.add_(self._mask[:, None, None]).softmax(-1)
        self._probs[self._at] = probs[..., :width]
        from_prompt = _product(self._probs.flatten(2, 3), prompt_values)
        from_prompt = from_prompt.view(self._scratch_shape(s.head_dim))[self._at]
        return _product(probs[..., width:], values).add_(from_prompt).view(rows, -1)

    def _drop_groups(self, seated: Tensor) -> None:
        """Keep the prompts of the slots in `seated` `[k]` alone."""
        needed, inverse = torch.unique(self._group[seated], return_inverse=True)
        if len(needed) < self._prompts.shape[2]:
            self._prompts, self._hidden = self._prompts[:, :, needed], self._hidden[needed]
            members = self._member[seated]
            self._group.zero_()
            self._member.fill_(self._n)  # dead slots must not write where a row sits
            self._group[seated], self._member[seated] = inverse, members

    def _make_scratch(self) -> None:
        width = self._prompts.shape[4]
        self._queries = self._prompts.new_zeros(self._scratch_shape(self.shape.head_dim))
        self._probs = self._prompts.new_zeros(self._scratch_shape(width))

    def _scratch_shape(self, last: int) -> tuple[int, ...]:
        """Queries of all groups and members; one spare member a group is for dead slots."""
        groups = self._prompts.shape[2]
        return groups, self.shape.kv_heads, self._n + 1, self.shape.share, last


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product over two leading dimensions, through one `bmm`."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _widened(kv: Tensor, columns: int) -> Tensor:
    """Return `kv` with `columns` columns; new ones are 0, for a NaN would outlive its mask."""
    if columns == kv.shape[4]:
        return kv
    return F.pad(kv, (0, 0, 0, columns - kv.shape[4]))
