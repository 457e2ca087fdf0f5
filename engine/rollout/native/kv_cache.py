"""Key/value caches of the running sequences, and attention of one new token each over them.

`KVCache` stores a whole sequence in its slot. `SharedPromptCache`, for groups of completions,
stores each prompt once, and one product reads its keys for all queries of a group. A cache is a
rectangle, so a bound on its memory (`KvBudget`) is one on slots and on the prompts that are kept at
once; `KeptPrefixes` holds sequences that ended for a next turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import RolloutError
from engine.kernels.decoding_ops import LiveCache


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of a batch or stream."""

    max_num_seqs: int  # sequences decoded at once, e.g. 512
    longest_prompt: int  # in tokens, e.g. 1024
    max_new_tokens: int  # longest completion, in tokens, e.g. 512
    max_model_len: int  # longest prompt plus completion, in tokens, e.g. 2048


class KvRoom(NamedTuple):
    """The sizes of a bounded cache."""

    slots: int  # sequences decoded at once
    columns: int  # longest sequence, prompt included, in tokens
    prompts: int | None = None  # kept at once, apart from completions; None: each slot has its own


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory for keys and values; what a forward pass of prompts takes for itself comes on top."""

    memory_mb: int  # e.g. 4096
    token_bytes: int  # of one token's keys and values, all layers, on this rank

    @property
    def tokens(self) -> int:
        return (self.memory_mb << 20) // self.token_bytes

    def check(self, name: str, prompt: int, longest: int) -> None:
        """Raise RolloutError unless one sequence of `longest` tokens fits, `prompt` of a prompt."""
        if longest > self.tokens:
            need = -(-longest * self.token_bytes >> 20)
            raise RolloutError(
                f"{name} has {prompt} tokens, and with its completion {longest}, whose keys and "
                f"values take {need} MiB; rollout.kv_cache_memory_mb={self.memory_mb} holds "
                f"{self.tokens} tokens; raise it, or lower the prompt's or the completion's length"
            )

    def room(self, n: int, limits: Limits) -> KvRoom:
        """Find room for sequences, `n` a prompt, within `limits`; one must fit (`check`)."""
        slots, prompt, new = limits.max_num_seqs, limits.longest_prompt, limits.max_new_tokens
        columns = min(prompt + new, limits.max_model_len)
        groups, rest_tokens = divmod(self.tokens, prompt + n * new)
        part_group = max(0, (rest_tokens - prompt) // new)  # of one more group
        shared = min(slots, groups * n + part_group)
        if n == 1 or not shared:
            return KvRoom(min(slots, self.tokens // columns), columns)
        return KvRoom(shared, columns, min(shared, (self.tokens - shared * new) // prompt))


class Prefix(NamedTuple):
    """The prefixes that k sequences of T tokens follow."""

    kv: Tensor  # [layers, 2, B, kv_heads, P, head_dim]
    which: Tensor  # [k], int64: sequence i follows prefix number which[i]
    mask: Tensor  # [k, 1, T, P + T], bool: True where a token of the sequence looks

    @staticmethod
    def of(kv: Tensor, which: Tensor, lengths: Tensor, width: int) -> Prefix:
        """Take `lengths` `[k]` tokens of prefixes `which` `[k]`, before `width` others."""
        columns = torch.arange(kv.shape[4], device=lengths.device)
        prefix_mask = (columns < lengths[:, None])[:, None].expand(-1, width, -1)
        causal = torch.ones(width, width, dtype=torch.bool, device=lengths.device).tril()
        mask = torch.cat((prefix_mask, causal.expand(len(lengths), -1, -1)), dim=-1)[:, None]
        return Prefix(kv, which, mask)


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """A sequence that ended, but for its last token, which was never fed."""

    ids: list[int]  # T tokens
    kv: Tensor  # [layers, 2, kv_heads, T, head_dim], a copy: its slot is free for others


class KeptPrefixes:
    """Prefixes by the key of their request, at most `max_tokens` tokens; the oldest go first."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._prefixes: dict[Hashable, KeptPrefix] = {}  # the oldest first

    def add(self, key: Hashable, prefix: KeptPrefix) -> None:
        self.drop(key)
        self._prefixes[key] = prefix
        self.tokens += len(prefix.ids)
        while self.tokens > self._max_tokens:
            self.drop(next(iter(self._prefixes)))

    def take(self, key: Hashable, prompt_ids: Sequence[int]) -> KeptPrefix | None:
        """Take out the prefix of a request; None if `prompt_ids` differ from it."""
        prefix = self._prefixes.get(key)
        self.drop(key)
        if prefix is None or len(prompt_ids) <= len(prefix.ids):
            return None
        return prefix if list(prompt_ids[: len(prefix.ids)]) == prefix.ids else None

    def drop(self, key: Hashable) -> None:
        prefix = self._prefixes.pop(key, None)
        self.tokens -= 0 if prefix is None else len(prefix.ids)

    def clear(self) -> None:
        """Forget all: the weights that made them are gone."""
        self._prefixes.clear()
        self.tokens = 0


_COLUMN_STEP = 32  # columns that storage grows by at least


class CacheShape(NamedTuple):
    """Sizes of a model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    queries_per_key: int  # query heads that share a key head
    scaling: float  # multiplies q·k


class KVCache:
    """Storage `[layers, 2, slots, kv_heads, T, head_dim]`, grown as sequences do."""

    def __init__(self, shape: CacheShape, slots: int, max_columns: int, like: Tensor) -> None:
        """Hold up to `max_columns` tokens in each of `slots`, in the dtype and device of `like`."""
        self.shape, self._max_columns = shape, max_columns
        size = (shape.layers, 2, slots, shape.kv_heads, 0, shape.head_dim)
        self._kv = like.new_empty(size)
        self._slots = torch.arange(slots, device=like.device)
        self._all_columns = torch.arange(max_columns, device=like.device)
        self._used = 0  # columns that any slot has used
        self.width = 0  # columns of this step
        self.reallocations = 0  # how often the storage was replaced by a larger one

    def insert(
        self, kv: Tensor, lengths: Tensor, which: Tensor, slots: Tensor, running: Tensor
    ) -> None:
        """Give prompts `which` `[k]`, ascending, of `kv` `[layers, 2, B, …, P, d]` to `slots`."""
        self.fill(kv, which, slots)

    def fill(self, kv: Tensor, which: Tensor, slots: Tensor) -> None:
        """Copy sequences `which` `[k]` of `kv` to the first columns of `slots` `[k]`."""
        width = kv.shape[4]
        self.reserve(width)
        self._kv[:, :, slots, :, :width] = kv[:, :, which]

    def append(self, kv: Tensor, first: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Write `counts` tokens of `kv` `[layers, 2, k, …, T, d]` from columns `first` on."""
        columns = torch.arange(kv.shape[4], device=kv.device)
        self.reserve(int((first + counts).max()))
        row, column = (columns < counts[:, None]).nonzero(as_tuple=True)
        values = kv.permute(2, 4, 0, 1, 3, 5)[row, column]  # [tokens, layers, 2, kv_heads, d]
        self._kv[:, :, slots[row], :, first[row] + column] = values

    def copy_slot(self, slot: int, columns: int) -> Tensor:
        """Return keys and values `[layers, 2, kv_heads, columns, d]` of a slot's first tokens."""
        return self._kv[:, :, slot, :, :columns].clone()

    def move(self, source: Tensor, target: Tensor, used: int) -> None:
        """Copy slots `source` `[k]` to `target` `[k]`; the first `used` slots stay in use."""
        self._kv[:, :, target, :, : self._used] = self._kv[:, :, source, :, : self._used]

    def begin(self, columns: Tensor, width: int | None = None) -> None:
        """Start a step in which the new token of slot i goes to column `columns[i]`, int64 `[L]`.

        `width`: columns to look at, which must have been reserved; None: those in use.
        """
        if width is None:
            width = int(columns.max()) + 1
            self.reserve(width)
        self.width = width
        self._columns, self._used_slots = columns, self._slots[: len(columns)]
        hidden = self._all_columns[: self.width] > columns[:, None]
        self.mask = self._kv.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)  # [L, T]

    def live(self, columns: Tensor) -> LiveCache:
        """Make room for a token in column `columns[i]` of slot i, int64 `[L]`."""
        self.reserve(int(columns.max()) + 1)
        return LiveCache(self._kv)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k and v `[L, kv_heads, d]`."""
        keys, values = self._kv[layer]
        keys[self._used_slots, :, self._columns] = k
        values[self._used_slots, :, self._columns] = v

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values `[L, kv_heads, T, d]` of the slots in use."""
        keys, values = self._kv[layer]
        used = len(self._used_slots)
        return keys[:used, :, : self.width], values[:used, :, : self.width]

    def at(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values `[slots, kv_heads, T, d]`, and this step's columns `[L]`."""
        keys, values = self._kv[layer]
        return keys, values, self._columns

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attend from q `[L, heads, d]` to what is stored, this step's too → `[L, heads·d]`.

        The query heads that share a key head are folded into the query length. On CPU two batched
        products are twice as fast as SDPA at one token a row.
        """
        s, rows = self.shape, q.shape[0]
        keys, values = self.stored(layer)
        folded = q.view(rows, s.kv_heads, s.queries_per_key, s.head_dim)
        if q.device.type != "cpu":
            bias = self.mask[:, None, None].expand(-1, -1, s.queries_per_key, -1)
            a = F.scaled_dot_product_attention(folded, keys, values, bias, scale=s.scaling)
            return a.flatten(1)
        scores = _product(folded * s.scaling, keys.transpose(2, 3))
        probs = scores.add_(self.mask[:, None, None]).softmax(-1)
        return _product(probs, values).view(rows, -1)

    def reserve(self, columns: int) -> None:
        """Make room for `columns` tokens a slot, keeping what is there."""
        self._used = max(self._used, columns)
        capacity = self._kv.shape[4]
        if columns > capacity:
            room = min(self._max_columns, max(columns + _COLUMN_STEP, capacity + capacity // 2))
            self._kv = _widened(self._kv, room)
            self.reallocations += 1


class SharedPromptCache(KVCache):
    """Completions by slot, in a step's columns; prompts `[layers, 2, groups, …, P, d]`."""

    def __init__(
        self, shape: CacheShape, slots: int, n: int, max_new_tokens: int, like: Tensor
    ) -> None:
        """Serve `slots` rows in groups of at most `n`, of at most `max_new_tokens` each."""
        super().__init__(shape, slots, max_new_tokens, like)
        self._n = n
        size = (shape.layers, 2, 0, shape.kv_heads, 0, shape.head_dim)
        self._prompts = like.new_empty(size)
        self._lengths = torch.zeros(0, dtype=torch.long, device=like.device)  # [groups]
        self._group = torch.zeros(slots, dtype=torch.long, device=like.device)
        self._member = torch.zeros(slots, dtype=torch.long, device=like.device)
        self._scratch_fits = False  # `_queries` and `_probs` have the prompts' shape

    def insert(
        self, kv: Tensor, lengths: Tensor, which: Tensor, slots: Tensor, running: Tensor
    ) -> None:
        """Keep prompts for `slots`; of those already here, only those of `running` are needed."""
        self._drop_groups(running)
        new_prompts, inverse, counts = torch.unique(which, return_inverse=True, return_counts=True)
        group_count, width = self._prompts.shape[2], max(kv.shape[4], self._prompts.shape[4])
        old, new = _widened(self._prompts, width), _widened(kv[:, :, new_prompts], width)
        self._prompts = torch.cat((old, new), dim=2)
        self._lengths = torch.cat((self._lengths, lengths[new_prompts]))
        self._group[slots] = group_count + inverse
        first = counts.cumsum(0) - counts
        self._member[slots] = torch.arange(len(which), device=which.device) - first[inverse]
        self._scratch_fits = False

    def prompt_count(self, slots: Tensor) -> int:
        """Return how many prompts the sequences in `slots` `[k]` follow."""
        return len(torch.unique(self._group[slots]))

    def move(self, source: Tensor, target: Tensor, used: int) -> None:
        super().move(source, target, used)
        self._group[target] = self._group[source]
        self._member[target] = self._member[source]
        needed = torch.unique(self._group[:used])
        if len(needed) < 0.75 * self._prompts.shape[2]:  # enough to be worth the copying
            self._drop_groups(torch.arange(used, device=needed.device))
            self._scratch_fits = False

    def begin(self, columns: Tensor, width: int | None = None) -> None:
        super().begin(columns, width)
        if not self._scratch_fits:
            self._queries = self._prompts.new_zeros(self._scratch_shape(self.shape.head_dim))
            self._probs = self._prompts.new_zeros(self._scratch_shape(self._prompts.shape[4]))
            self._scratch_fits = True
        self._at = self._group[: len(columns)], slice(None), self._member[: len(columns)]
        positions = torch.arange(self._prompts.shape[4], device=columns.device)
        padding = positions >= self._lengths[:, None]
        prompt_mask = self.mask.new_zeros(padding.shape).masked_fill_(padding, -torch.inf)
        self._mask = torch.cat((prompt_mask[self._at[0]], self.mask), dim=1)

    def live(self, columns: Tensor) -> LiveCache:
        completions = super().live(columns).completions
        return LiveCache(completions, self._prompts, self._group[: len(columns)], self._lengths)

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attend from q `[L, heads, d]` to prompts and completions → `[L, heads·d]`.

        One softmax runs over both scores. Members of a group that have finished leave old finite
        numbers in the scratch tensors, whose products are not read.
        """
        s, rows = self.shape, q.shape[0]
        keys, values = self.stored(layer)
        prompt_keys, prompt_values = self._prompts[layer]  # each [groups, kv_heads, P, d]
        width = prompt_keys.shape[2]
        folded = q.view(rows, s.kv_heads, s.queries_per_key, s.head_dim) * s.scaling
        self._queries[self._at] = folded
        on_prompt = _product(self._queries.flatten(2, 3), prompt_keys.transpose(2, 3))
        on_prompt = on_prompt.view(self._scratch_shape(width))[self._at]
        scores = torch.cat((on_prompt, _product(folded, keys.transpose(2, 3))), dim=-1)
        probs = scores.add_(self._mask[:, None, None]).softmax(-1)
        self._probs[self._at] = probs[..., :width]
        from_prompt = _product(self._probs.flatten(2, 3), prompt_values)
        from_prompt = from_prompt.view(self._scratch_shape(s.head_dim))[self._at]
        return _product(probs[..., width:], values).add_(from_prompt).view(rows, -1)

    def _drop_groups(self, running: Tensor) -> None:
        """Keep only the prompts of the slots `running` `[k]`."""
        needed, inverse = torch.unique(self._group[running], return_inverse=True)
        if len(needed) < self._prompts.shape[2]:
            self._prompts = self._prompts[:, :, needed].contiguous()
            self._lengths = self._lengths[needed]
            members = self._member[running]
            self._group.zero_()
            self._member.fill_(self._n)  # finished slots must not write where a running one does
            self._group[running], self._member[running] = inverse, members

    def _scratch_shape(self, last: int) -> tuple[int, ...]:
        """Return the shape of all members' queries; each group has a spare for finished slots."""
        groups = self._prompts.shape[2]
        return groups, self.shape.kv_heads, self._n + 1, self.shape.queries_per_key, last


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices batched over two leading dimensions, through one `bmm`."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _widened(kv: Tensor, columns: int) -> Tensor:
    """Return `kv` with `columns` columns; new ones are 0, for a NaN would outlive its mask."""
    if columns == kv.shape[4]:
        return kv
    return F.pad(kv, (0, 0, 0, columns - kv.shape[4]))
