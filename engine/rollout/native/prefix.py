"""Keys and values that sequences attend to before themselves, and what each token sees of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Prefix(NamedTuple):
    """What k sequences of T tokens follow."""

    kv: Tensor  # [layers, 2, B, kv_heads, P, head_dim]
    which: Tensor  # [k], int64: sequence i follows prefix number which[i]
    mask: Tensor  # [k, 1, T, P + T], bool: True where a token of the sequence looks

    @staticmethod
    def of(kv: Tensor, which: Tensor, lengths: Tensor, width: int) -> Prefix:
        """The first `lengths` `[k]` tokens of prefixes `which` `[k]`, before `width` others."""
        columns = torch.arange(kv.shape[4], device=lengths.device)
        before = (columns < lengths[:, None])[:, None].expand(-1, width, -1)
        own = torch.ones(width, width, dtype=torch.bool, device=lengths.device).tril()
        mask = torch.cat((before, own.expand(len(lengths), -1, -1)), dim=-1)[:, None]
        return Prefix(kv, which, mask)
