"""Decoding of the Llama family with the trainer's parameters.

`LlamaDecoder` computes what the transformers modules compute, in fewer and larger operations, over
the caches of `kv_cache`. On a GPU, where launching a step's kernels takes longer than running them,
`GraphedSteps` replays CUDA graphs. A graph has one shape, so the batch is padded to a power of two
and columns to a multiple of 128, and a shape is captured after it has come up a few times.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels import triton_kernels
from engine.kernels.choices import choose
from engine.kernels.decoding_ops import LayerWeights, LinearWeights, RMSNorm, cpu_step
from engine.rollout.native.decoder import Prefilled, padded
from engine.rollout.native.decoding_weights import LlamaWeights, UnsupportedModel, bind
from engine.rollout.native.kv_cache import CacheShape, KVCache, KvRoom, Prefix, SharedPromptCache
from engine.rollout.protocol import TokenLists

Step = Callable[[Tensor, Tensor, int], Tensor]  # tokens [R], positions [R], columns → logits [R, V]
Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]

_COLUMNS = 128
_BEFORE_CAPTURE = 2  # a capture costs about three steps


class _Captured(NamedTuple):
    """A step of one shape, and where its inputs go; what `replay` gives the next one overwrites."""

    tokens: Tensor  # [R], int64
    positions: Tensor  # [R], int64
    replay: Replay


class GraphedSteps:
    """Runs steps over the first of `slots`, each in the next larger of a few shapes.

    A padding row writes to position 0 of a free slot, where the slot's next sequence overwrites it.
    """

    def __init__(self, step: Step, slots: int, columns: int, capture: Capture) -> None:
        self._step, self._slots, self._max_columns = step, slots, columns
        self._capture = capture
        self.clear()

    def padded_columns(self, used: int) -> int:
        """Round `used`, the columns that sequences use, up to those that a step runs over."""
        return min(-(-used // _COLUMNS) * _COLUMNS, self._max_columns)

    def run(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Return logits `[R, V]` for `tokens` and `positions` `[R]`, valid until the next call."""
        rows = len(tokens)
        padded = min(1 << (rows - 1).bit_length(), self._slots)
        shape = padded, columns
        if shape not in self._captured and self._seen[shape] < _BEFORE_CAPTURE:
            self._seen[shape] += 1
            return self._step(tokens, positions, columns)
        captured = self._captured.get(shape)
        # A capture runs the step once more: its inputs must be this step's, which changes nothing.
        if captured is None:
            buffers = tokens.new_empty(padded), tokens.new_empty(padded)
        else:
            buffers = captured.tokens, captured.positions
        for buffer, values in zip(buffers, (tokens, positions), strict=True):
            buffer[:rows] = values
            buffer[rows:] = 0
        if captured is None:
            replay = self._capture(lambda: self._step(*buffers, columns))
            captured = self._captured[shape] = _Captured(*buffers, replay)
        return captured.replay()[:rows]

    def clear(self) -> None:
        """Drop all graphs: weights or keys have another address now."""
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._seen: Counter[tuple[int, int]] = Counter()


class CudaGraphs:
    """Captures functions of fixed shapes and addresses; graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, function: Replay) -> Replay:
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            current, capture_stream = torch.cuda.current_stream(), torch.cuda.Stream()
            capture_stream.wait_stream(current)
            with torch.cuda.stream(capture_stream):
                function()  # libraries make their handles and workspaces now, not in the capture
            current.wait_stream(capture_stream)
            if not self._alive:  # a pool whose graphs are all gone can't be captured into
                self._pool = torch.cuda.graph_pool_handle()
            self._alive.add(graph)
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return output

        return replay


_RECOUNT = 64  # steps after which a graph's columns are counted again


class LlamaDecoder:
    """A `Decoder` over bound weights; lives for one rollout or stream."""

    static_batches = False
    routed_experts: Tensor | None = None  # a dense model

    _steps_counted = 0  # since `_longest_position` was counted
    _longest_position: int
    _fuses: bool  # a step's layers by kernels
    _captured_at: int  # the cache's reallocations when steps were captured; -1: none are
    _w: LlamaWeights

    def __init__(
        self,
        weights: LlamaWeights,
        slots: int,
        n: int,
        longest_prompt: int,
        max_new_tokens: int,
        *,
        room: KvRoom | None = None,
        cuda_graphs: bool = False,
        capture: Capture | None = None,
    ) -> None:
        """Serve `slots` sequences, `n` completions a prompt; or those that `room` has.

        With `cuda_graphs`, the completions of a prompt don't share keys, whose addresses would
        change with the groups; `capture` replaces the graph.
        """
        like = weights.embedding
        self._columns = columns = longest_prompt + max_new_tokens
        shape = _cache_shape(weights)
        grouped = n > 1 and not cuda_graphs
        self._most_prompts: int | None = None
        if room is not None:
            slots, columns, self._most_prompts = room
            grouped = grouped and self._most_prompts is not None
        self.slots = slots
        self._cache = (
            SharedPromptCache(shape, slots, n, max_new_tokens, like)
            if grouped
            else KVCache(shape, slots, columns, like)
        )
        if room is not None:  # growing it would take the old and the new storage at once
            self._cache.reserve(max_new_tokens if grouped else columns)
        self._graphed: GraphedSteps | None = None
        if cuda_graphs:
            capture = capture or CudaGraphs(like.device)
            self._graphed = GraphedSteps(self._step, slots, columns, capture)
        self._use(weights)

    @property
    def shares_prompts(self) -> bool:
        return isinstance(self._cache, SharedPromptCache)

    def free_prompts(self, running: Tensor) -> int:
        if self._most_prompts is None or not isinstance(self._cache, SharedPromptCache):
            return self.slots
        return self._most_prompts - self._cache.prompt_count(running)

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()  # modules are not called

    def rebind(self, model: nn.Module) -> bool:
        try:
            weights = bind(model, merge=self._w.merged)
        except UnsupportedModel:
            return False
        old, new = self._w.embedding, weights.embedding
        same_place = (old.dtype, old.device) == (new.dtype, new.device)
        if not same_place or _cache_shape(weights) != _cache_shape(self._w):
            return False
        self._use(weights)
        return True

    def prefill(self, prompts: TokenLists) -> Prefilled:
        """Run whole prompts, padded on the right (causal attention never looks there)."""
        device = self._w.embedding.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        ids = padded(prompts).to(device)
        width = ids.shape[1]
        x, kv = self._run(ids, self._cos[:width, None], self._sin[:width, None], None)
        last = x[torch.arange(len(prompts), device=device), lengths - 1]
        return Prefilled(self._logits(last), lengths, kv)

    def extend(
        self, prefilled: Prefilled, which: Tensor, tokens: TokenLists, slots: Tensor
    ) -> None:
        # The prompts' keys are used as they are, not computed again for each completion.
        self._steps_counted = 0
        _, kv = self._run_after(prefilled.state, which, prefilled.lengths[which], tokens)
        self._cache.fill(kv, torch.arange(len(slots), device=slots.device), slots)

    def keep(self, slot: int, length: int) -> Tensor | None:
        return None if self.shares_prompts else self._cache.copy_slot(slot, length)

    def resume(self, prefixes: Sequence[Tensor], tokens: TokenLists, slots: Tensor) -> Tensor:
        self._steps_counted = 0
        device = slots.device
        lengths = torch.tensor([kv.shape[3] for kv in prefixes], device=device)
        counts = torch.tensor([len(row_tokens) for row_tokens in tokens], device=device)
        rows = torch.arange(len(prefixes), device=device)
        layers, two, heads, _, size = prefixes[0].shape
        state = prefixes[0].new_zeros(layers, two, len(prefixes), heads, int(lengths.max()), size)
        for row, kv in enumerate(prefixes):
            state[:, :, row, :, : kv.shape[3]] = kv
        x, new = self._run_after(state, rows, lengths, tokens)
        self._cache.fill(state, rows, slots)
        self._cache.append(new, lengths, counts, slots)
        return self._logits(x[rows, counts - 1])

    def insert(self, prefilled: Prefilled, which: Tensor, slots: Tensor, running: Tensor) -> None:
        self._steps_counted = 0
        self._cache.insert(prefilled.state, prefilled.lengths, which, slots, running)

    def move(self, source: Tensor, target: Tensor, used: int) -> None:
        self._cache.move(source, target, used)

    def decode(self, tokens: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        if self._graphed is None:
            columns = columns if self.shares_prompts else positions
            compiled = self._cpu_step

            def step(by_compiled: bool, rows: int = len(tokens)) -> Tensor:
                if by_compiled and compiled is not None:
                    return compiled.run(tokens, positions, columns, self._cache.live(columns))
                self._cache.begin(columns)
                return self._layers(tokens, positions)

            if compiled is None:
                return step(False)
            return step(choose("decode step", len(tokens), self._sizes, step).is_compiled)
        width = self._graphed.padded_columns(self._longest(positions) + 1)
        self._cache.reserve(width)
        if self._captured_at != self._cache.reallocations:
            self._captured_at = self._cache.reallocations
            self._graphed.clear()
        return self._graphed.run(tokens, positions, width)

    def _longest(self, positions: Tensor) -> int:
        """Bound the largest of `positions` from above; counting them waits for the device."""
        if self._steps_counted % _RECOUNT == 0:
            self._longest_position = int(positions.max())
            self._steps_counted = 0
        else:
            self._longest_position = min(self._longest_position + 1, self._columns - 1)
        self._steps_counted += 1
        return self._longest_position

    def _step(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        """Run a step over `width` columns, with nothing in it that a graph can't hold."""
        self._cache.begin(positions, width)
        return self._layers(tokens, positions)

    def _layers(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits `[L, V]` of one token a slot, over a cache whose step was started."""
        w = self._w
        x = self._embed(tokens)
        if self._fuses:
            return self._fused_layers(x, positions)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(w.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            self._cache.store(index, k, v)
            x = self._finish_layer(layer, x, self._cache.read(index, q))
        return self._logits(x)

    def _fused_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        """Run the layers on x `[L, hidden]` with kernels for all but products and attention."""
        w, rotary = self._w, (self._cos, self._sin)
        plus: Tensor | None = None  # the last MLP's output, which is not in x yet
        for index, layer in enumerate(w.layers):
            x, h = triton_kernels.add_norm(x, plus, *layer.input_norm)
            products = (w.project(h, by) for by in (layer.q, layer.k, layer.v))
            q, k, v = (y.unflatten(-1, (-1, w.head_dim)) for y in products)
            if layer.q_norm is not None and layer.k_norm is not None:
                _, q = triton_kernels.add_norm(q, None, *layer.q_norm)
                _, k = triton_kernels.add_norm(k, None, *layer.k_norm)
            keys, values, columns = self._cache.at(index)
            q = triton_kernels.rotate_and_store(q, k, v, rotary, positions, (keys, values), columns)
            attended = self._project_back(self._cache.read(index, q), layer.o)
            x, h = triton_kernels.add_norm(x, attended, *layer.post_norm)
            gated = triton_kernels.silu_product(w.project(h, layer.gate), w.project(h, layer.up))
            plus = self._project_back(gated, layer.down)
        _, h = triton_kernels.add_norm(x, plus, *w.norm)
        logits = w.project(h, w.head)
        return logits if w.tp is None else w.tp.gather_logits(logits)

    def _use(self, weights: LlamaWeights) -> None:
        self._w = w = weights
        self._captured_at = -1
        positions = torch.arange(self._columns, device=w.embedding.device)
        cos, sin = w.rotary(w.embedding, positions[None])
        self._cos = cos[0]  # [columns, head_dim]
        # rotate_half(x) * sin == roll(x, head_dim / 2) * sin with the first half negated
        half = w.head_dim // 2
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self._cpu_step = cpu_step(w, self._cos, self._sin) if w.tp is None else None
        if self._cpu_step is not None:
            inner, hidden = w.layers[0].gate.weight.shape
            self._sizes = hidden, inner, len(w.layers), len(w.head.weight)
        on_device = w.embedding.is_cuda and triton_kernels.takes(w.embedding)
        self._fuses = on_device and w.activation is F.silu

    def _run_after(
        self, state: Tensor, which: Tensor, lengths: Tensor, tokens: TokenLists
    ) -> tuple[Tensor, Tensor]:
        """Run lists of `tokens`; i follows `lengths[i]` tokens of `state`'s prompt `which[i]`."""
        ids = padded(tokens).to(lengths.device)
        width = ids.shape[1]
        positions = lengths[:, None] + torch.arange(width, device=lengths.device)
        positions = positions.clamp(max=self._columns - 1)  # of padding alone
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        return self._run(ids, cos, sin, Prefix.of(state, which, lengths, width))

    def _run(
        self, ids: Tensor, cos: Tensor, sin: Tensor, prefix: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        """Return the last layer's output `[B, T, hidden]`, and keys and values."""
        w = self._w
        x = self._embed(ids)
        kv = x.new_empty(len(w.layers), 2, len(ids), w.kv_heads, ids.shape[1], w.head_dim)
        for index, (layer, (keys, values)) in enumerate(zip(w.layers, kv, strict=True)):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys.copy_(k.transpose(1, 2))
            values.copy_(v.transpose(1, 2))
            if prefix is not None:
                before_keys, before_values = prefix.kv[index]
                keys = torch.cat((before_keys[prefix.which], keys), dim=2)
                values = torch.cat((before_values[prefix.which], values), dim=2)
            a = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys,
                values,
                attn_mask=None if prefix is None else prefix.mask,
                is_causal=prefix is None,
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
        products = (w.project(h, by) for by in (layer.q, layer.k, layer.v))
        q, k, v = (y.unflatten(-1, (-1, w.head_dim)) for y in products)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _rms_norm(q, layer.q_norm), _rms_norm(k, layer.k_norm)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), v

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply RoPE (Su et al., 2021; arXiv:2104.09864) in the half-split layout."""
        return (x * cos).addcmul_(x.roll(self._w.head_dim // 2, -1), sin)

    def _finish_layer(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Apply output projection, residuals and the gated MLP to x `[…, hidden]`."""
        w = self._w
        x = x + self._project_back(attended, layer.o)
        h = _rms_norm(x, layer.post_norm)
        gated = w.activation(w.project(h, layer.gate)).mul_(w.project(h, layer.up))
        return x.add_(self._project_back(gated, layer.down))

    def _embed(self, ids: Tensor) -> Tensor:
        w = self._w
        return F.embedding(ids, w.embedding) if w.tp is None else w.tp.embed(ids, w.embedding)

    def _project_back(self, x: Tensor, weight: LinearWeights) -> Tensor:
        """Project to the hidden size; ranks that hold columns of the weight add theirs up."""
        w = self._w
        if w.tp is None:
            return w.project(x, weight)
        y = w.tp.all_reduce(w.linear(x, weight.weight, None))
        return y if weight.bias is None else y.add_(weight.bias)

    def _logits(self, x: Tensor) -> Tensor:
        w = self._w
        logits = w.project(_rms_norm(x, w.norm), w.head)
        return logits if w.tp is None else w.tp.gather_logits(logits)

    def sync_samples(self, tokens: Tensor, log_probs: Tensor) -> None:
        if self._w.tp is not None:
            self._w.tp.sync_samples(tokens, log_probs)


def can_graph(weights: LlamaWeights) -> bool:
    return weights.embedding.device.type == "cuda" and weights.tp is None


def _cache_shape(w: LlamaWeights) -> CacheShape:
    return CacheShape(len(w.layers), w.kv_heads, w.head_dim, w.heads // w.kv_heads, w.scaling)


def _rms_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """RMSNorm (arXiv:1910.07467) as transformers computes it: statistics in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * y.to(x.dtype)
