"""Forward passes for decoding with the trainer's parameters.

`LlamaDecoder` computes what the transformers modules of the Llama family compute, in fewer and
larger operations, over the caches of `cache.py`. Scheduling and sampling live elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.rollout.native.cache import CacheShape, GroupCache, RowCache
from engine.rollout.native.weights import LayerWeights, ModelWeights, Norm


class Prefilled(NamedTuple):
    """B computed prompts, ready to be placed."""

    logits: Tensor  # [B, V], after each prompt's last token
    lengths: Tensor  # [B], int64
    kv: Tensor  # [layers, 2, B, kv_heads, P, head_dim]

    def last(self) -> Prefilled:
        """The last prompt alone, in storage of its own."""
        return Prefilled(
            self.logits[-1:].clone(), self.lengths[-1:].clone(), self.kv[:, :, -1:].clone()
        )


class LlamaDecoder:
    """Prefill and single-token steps over bound weights; lives for one rollout."""

    def __init__(
        self, weights: ModelWeights, slots: int, n: int, longest_prompt: int, max_new_tokens: int
    ) -> None:
        """Serve `slots` rows, `n` completions a prompt."""
        self._w = w = weights
        like = w.embedding
        shape = CacheShape(len(w.layers), w.kv_heads, w.head_dim, w.heads // w.kv_heads, w.scaling)
        columns = longest_prompt + max_new_tokens
        self._rows = RowCache(shape, slots, columns, like) if n == 1 else None
        self._groups = GroupCache(shape, slots, n, max_new_tokens, like) if n > 1 else None
        positions = torch.arange(columns, device=like.device)
        cos, sin = w.rotary(like, positions[None])
        self._cos = cos[0]  # [columns, head_dim]
        # rotate_half(x) * sin == roll(x, head_dim / 2) * sin with the first half's sign turned
        half = w.head_dim // 2
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run whole prompts, padded on the right (causal attention never looks there)."""
        w = self._w
        device = w.embedding.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
        x = F.embedding(ids.to(device), w.embedding)
        cos, sin = self._cos[:width, None], self._sin[:width, None]
        kv = x.new_empty(len(w.layers), 2, len(prompts), w.kv_heads, width, w.head_dim)
        for layer, (keys, values) in zip(w.layers, kv, strict=True):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys.copy_(k.transpose(1, 2))
            values.copy_(v.transpose(1, 2))
            a = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys,
                values,
                is_causal=True,
                scale=w.scaling,
                enable_gqa=w.heads != w.kv_heads,
            )
            x = self._finish_layer(layer, x, a.transpose(1, 2).flatten(2))
        last = x[torch.arange(len(prompts), device=device), lengths - 1]
        return Prefilled(self._logits(last), lengths, kv)

    def place(self, prefilled: Prefilled, which: Tensor, slots: Tensor, seated: Tensor) -> None:
        """Give prompts `which` `[k]` to `slots` `[k]`; `seated` are the slots of other rows."""
        if self._groups is not None:
            self._groups.place(prefilled.kv, prefilled.lengths, which, slots, seated)
        elif self._rows is not None:
            self._rows.place(prefilled.kv, which, slots)

    def compact(self, source: Tensor, target: Tensor, live: int) -> None:
        """Copy slots `source` `[k]` to `target` `[k]`; the first `live` slots stay in use."""
        if self._groups is not None:
            self._groups.move(source, target)
            self._groups.trim(live)
        elif self._rows is not None:
            self._rows.move(source, target)

    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Feed one token to each of the first L slots and return logits `[L, V]`.

        `tokens`, their `positions` in the sequence and `columns` in the completion are int64 `[L]`.
        """
        w = self._w
        cache: RowCache | GroupCache
        if self._groups is not None:
            cache = self._groups
            cache.begin(columns)
        else:
            assert self._rows is not None
            cache = self._rows
            cache.begin(positions)
        x = F.embedding(tokens, w.embedding)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(w.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            x = self._finish_layer(layer, x, cache.attend(index, q, k, v))
        return self._logits(x)

    def _qkv(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x `[…, hidden]` to rotated q and k and v, each `[…, heads, head_dim]`."""
        w = self._w
        h = _rms_norm(x, layer.input_norm)
        q = w.linear(h, *layer.q).unflatten(-1, (w.heads, w.head_dim))
        k = w.linear(h, *layer.k).unflatten(-1, (w.kv_heads, w.head_dim))
        v = w.linear(h, *layer.v).unflatten(-1, (w.kv_heads, w.head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _rms_norm(q, layer.q_norm), _rms_norm(k, layer.k_norm)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), v

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply RoPE (Su et al., 2021; arXiv:2104.09864) in the half-split layout."""
        return (x * cos).addcmul_(x.roll(self._w.head_dim // 2, -1), sin)

    def _finish_layer(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and the gated MLP, on x `[…, hidden]`."""
        w = self._w
        x = x + w.linear(attended, *layer.o)
        h = _rms_norm(x, layer.post_norm)
        gated = w.activation(w.linear(h, *layer.gate)).mul_(w.linear(h, *layer.up))
        return x.add_(w.linear(gated, *layer.down))

    def _logits(self, x: Tensor) -> Tensor:
        return self._w.linear(_rms_norm(x, self._w.norm), *self._w.head)


def _rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm (arXiv:1910.07467) as transformers computes it: statistics in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * y.to(x.dtype)
