"""Forward passes for decoding with the trainer's parameters.

`LlamaDecoder` computes what the transformers modules of the Llama family compute, in fewer and
larger operations, over the caches of `cache.py`. Scheduling and sampling live elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.rollout.native.cache import CacheShape, GroupCache, RowCache
from engine.rollout.native.graphs import Capture, CudaGraphs, FixedSteps
from engine.rollout.native.weights import (
    LayerWeights,
    ModelWeights,
    Norm,
    Unsupported,
    Weight,
    bind,
)


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


class Past(NamedTuple):
    """What whole sequences attend to before themselves."""

    kv: Tensor  # [layers, 2, B, kv_heads, P, head_dim]
    which: Tensor  # [k], int64: sequence i follows past number which[i]
    mask: Tensor  # [k, 1, T, P + T], bool: True where a token of the sequence looks


class LlamaDecoder:
    """Prefill and single-token steps over bound weights; lives for one rollout or stream."""

    _moves: int  # of the cache when steps were captured; -1: none are
    _w: ModelWeights

    def __init__(
        self,
        weights: ModelWeights,
        slots: int,
        n: int,
        longest_prompt: int,
        max_new_tokens: int,
        *,
        cuda_graphs: bool = False,
        capture: Capture | None = None,
    ) -> None:
        """Serve `slots` rows, `n` completions a prompt.

        With `cuda_graphs`, rows of a group don't share keys, whose addresses would change with the
        groups; `capture` replaces the graph.
        """
        like = weights.embedding
        self._columns = columns = longest_prompt + max_new_tokens
        shape = _cache_shape(weights)
        grouped = n > 1 and not cuda_graphs
        self._rows = None if grouped else RowCache(shape, slots, columns, like)
        self._groups = GroupCache(shape, slots, n, max_new_tokens, like) if grouped else None
        self._steps: FixedSteps | None = None
        if cuda_graphs:
            capture = capture or CudaGraphs(like.device)
            self._steps = FixedSteps(self._step, slots, columns, capture)
        self._use(weights)

    @property
    def shares_prompts(self) -> bool:
        """Whether a group's rows share the keys of their prompt, so that a row is placed by
        `place` (its prompt) and `place_tails` (its own tokens)."""
        return self._groups is not None

    def adopt(self, model: Any) -> bool:
        """Go on with `model`'s weights over the keys and values that are cached.

        False, with nothing changed, if they would not fit them.
        """
        try:
            weights = bind(model)
        except Unsupported:
            return False
        old, new = self._w.embedding, weights.embedding
        same_place = (old.dtype, old.device) == (new.dtype, new.device)
        if not same_place or _cache_shape(weights) != _cache_shape(self._w):
            return False
        self._use(weights)
        return True

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """Run whole prompts, padded on the right (causal attention never looks there)."""
        device = self._w.embedding.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        ids = _padded(prompts).to(device)
        width = ids.shape[1]
        x, kv = self._run(ids, self._cos[:width, None], self._sin[:width, None], None)
        last = x[torch.arange(len(prompts), device=device), lengths - 1]
        return Prefilled(self._logits(last), lengths, kv)

    def place_tails(
        self, prefilled: Prefilled, which: Tensor, tails: Sequence[Sequence[int]], slots: Tensor
    ) -> None:
        """Compute the completions so far, `tails` of k lists, of rows that `place` gave a prompt.

        Row i follows prompt `which[i]` and sits in slot `slots[i]`, both int64 `[k]`. The prompts'
        keys are used as they are, so a group's prompt is not computed again for each of its rows.
        """
        assert self._groups is not None
        lengths = prefilled.lengths[which]
        ids = _padded(tails).to(lengths.device)
        count, width = ids.shape
        positions = lengths[:, None] + torch.arange(width, device=lengths.device)
        columns = torch.arange(prefilled.kv.shape[4], device=lengths.device)
        on_prompt = (columns < lengths[:, None])[:, None].expand(-1, width, -1)
        on_itself = ids.new_ones(width, width, dtype=torch.bool).tril().expand(count, -1, -1)
        mask = torch.cat((on_prompt, on_itself), dim=-1)[:, None]
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        _, kv = self._run(ids, cos, sin, Past(prefilled.kv, which, mask))
        self._groups.place_tails(kv, slots)

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
        if self._groups is not None:
            self._groups.begin(columns)
            return self._layers(tokens, positions, self._groups)
        assert self._rows is not None
        if self._steps is None:
            self._rows.begin(positions)
            return self._layers(tokens, positions, self._rows)
        width, moves = self._steps.columns(int(positions.max()) + 1), self._moves
        self._rows.reserve(width)
        self._moves = self._rows.moves
        if self._moves != moves:
            self._steps.forget()
        return self._steps.run(tokens, positions, width)

    def _step(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        """One step over `width` columns, with nothing in it that a graph can't hold."""
        assert self._rows is not None
        self._rows.begin(positions, width)
        return self._layers(tokens, positions, self._rows)

    def _layers(self, tokens: Tensor, positions: Tensor, cache: RowCache | GroupCache) -> Tensor:
        """Logits `[L, V]` of one token a row, over a cache that has begun the step."""
        w = self._w
        x = self._embed(tokens)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(w.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            x = self._finish_layer(layer, x, cache.attend(index, q, k, v))
        return self._logits(x)

    def _use(self, weights: ModelWeights) -> None:
        self._w = w = weights
        self._moves = -1
        positions = torch.arange(self._columns, device=w.embedding.device)
        cos, sin = w.rotary(w.embedding, positions[None])
        self._cos = cos[0]  # [columns, head_dim]
        # rotate_half(x) * sin == roll(x, head_dim / 2) * sin with the first half's sign turned
        half = w.head_dim // 2
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def _run(
        self, ids: Tensor, cos: Tensor, sin: Tensor, past: Past | None
    ) -> tuple[Tensor, Tensor]:
        """Run sequences `[B, T]`: the last layer's output `[B, T, hidden]`, and their own keys and
        values `[layers, 2, B, kv_heads, T, head_dim]`."""
        w = self._w
        x = self._embed(ids)
        kv = x.new_empty(len(w.layers), 2, len(ids), w.kv_heads, ids.shape[1], w.head_dim)
        for index, (layer, (keys, values)) in enumerate(zip(w.layers, kv, strict=True)):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys.copy_(k.transpose(1, 2))
            values.copy_(v.transpose(1, 2))
            if past is not None:
                before_keys, before_values = past.kv[index]
                keys = torch.cat((before_keys[past.which], keys), dim=2)
                values = torch.cat((before_values[past.which], values), dim=2)
            a = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys,
                values,
                attn_mask=None if past is None else past.mask,
                is_causal=past is None,
                scale=w.scaling,
                enable_gqa=w.heads != w.kv_heads,
            )
            x = self._finish_layer(layer, x, a.transpose(1, 2).flatten(2))
        return x, kv

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
        x = x + self._summed(attended, layer.o)
        h = _rms_norm(x, layer.post_norm)
        gated = w.activation(w.linear(h, *layer.gate)).mul_(w.linear(h, *layer.up))
        return x.add_(self._summed(gated, layer.down))

    def _embed(self, ids: Tensor) -> Tensor:
        w = self._w
        return F.embedding(ids, w.embedding) if w.tp is None else w.tp.embed(ids, w.embedding)

    def _summed(self, x: Tensor, weight: Weight) -> Tensor:
        """A projection back to the hidden size; ranks that hold columns of it add theirs up."""
        w = self._w
        if w.tp is None:
            return w.linear(x, *weight)
        y = w.tp.sum(w.linear(x, weight.weight, None))
        return y if weight.bias is None else y.add_(weight.bias)

    def _logits(self, x: Tensor) -> Tensor:
        w = self._w
        logits = w.linear(_rms_norm(x, w.norm), *w.head)
        return logits if w.tp is None else w.tp.gather_logits(logits)

    def settle(self, token: Tensor, log_prob: Tensor) -> None:
        """See that all ranks that decode together have drawn the same."""
        if self._w.tp is not None:
            self._w.tp.settle(token, log_prob)


def can_graph(weights: ModelWeights) -> bool:
    """Whether steps over these weights can be captured as CUDA graphs."""
    return weights.embedding.device.type == "cuda" and weights.tp is None


def _cache_shape(w: ModelWeights) -> CacheShape:
    return CacheShape(len(w.layers), w.kv_heads, w.head_dim, w.heads // w.kv_heads, w.scaling)


def _padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Token ids int64 `[B, T]`, padded on the right with 0."""
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(sequence)
    return ids


def _rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm (arXiv:1910.07467) as transformers computes it: statistics in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * y.to(x.dtype)
